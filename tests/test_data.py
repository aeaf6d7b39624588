"""Corpus, tokenizers, packing, sample order and ledger."""

from __future__ import annotations

import json
import multiprocessing
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from atoll.errors import DataError
from atoll.policies.data.order import held_out, permute, samples, samples_at
from atoll.policies.data.spec import DataSpec, TokenizerSpec
from atoll.runtime.data.corpus import open_corpus
from atoll.runtime.data.ledger import IDS_KEPT, About, Ledger, about, prove, read_ledger
from atoll.runtime.data.packed import Packed, PackedBatches, compare, open_packed, prepare
from atoll.runtime.data.tokenizer import END, Tokenizer, byte_level, load_tokenizer, make_tokenizer, train_bpe

torch.set_num_threads(1)

WORDS = "the quick brown fox jumps over a lazy dog while élan and 漢字 wait\n"


def _texts(count: int) -> list[str]:
    return [f"document {number}: " + WORDS * (number % 7 + 1) for number in range(count)]


def _folder(root: Path, count: int = 300) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(_texts(count)):
        (root / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return root


# --- sample order -----------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), total=st.integers(1, 600))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, total: int) -> None:
    assert sorted(permute(seed, epoch, offset, total) for offset in range(total)) == list(range(total))


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 70), total=st.integers(1, 60), data=st.data())
def test_every_id_once_per_epoch_also_when_it_ends_inside_a_step(seed: int, batch: int, total: int,
                                                                 data: st.DataObject) -> None:
    epochs = 3
    count = -(-epochs * total // batch)
    stream = [sample for step in range(count) for sample in samples(seed, step, batch, total)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * total:(epoch + 1) * total]) == list(range(total))
    cut = data.draw(st.integers(0, batch))
    step = data.draw(st.integers(0, count))
    parts = samples_at(seed, step * batch, cut, total) + samples_at(seed, step * batch + cut, batch - cut, total)
    assert parts == samples(seed, step, batch, total)  # however members share a step, it is the same samples


def test_order_depends_on_seed_and_epoch_and_looks_random() -> None:
    total = 4001
    first = np.array(samples(1, 0, total, total))
    for other in (samples(2, 0, total, total), samples(1, 1, total, total), tuple(range(total))):
        assert np.mean(first == np.array(other)) < 0.005
    assert abs(np.corrcoef(np.arange(total), first)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.05
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), [permute(0, epoch, offset, 6) for offset in range(6)]] += 1
    assert np.abs(counts / 3000 - 1 / 6).max() < 0.03  # about 4.4 standard deviations


def test_order_is_pinned() -> None:
    """A checkpoint made by an older version must continue with the same samples."""
    assert samples(0, 0, 8, 1000) == (545, 148, 419, 860, 17, 892, 590, 740)


def test_order_needs_no_memory_for_huge_corpora() -> None:
    ids = samples(7, 10**9, 64, 10**12)
    assert len(set(ids)) == 64 and max(ids) < 10**12


def test_held_out_order_is_fixed_and_starts_over() -> None:
    assert sorted(held_out(0, 50, 50)) == list(range(50))
    assert held_out(0, 5, 50) + held_out(5, 5, 50) == held_out(0, 10, 50)
    assert held_out(50, 5, 50) == held_out(0, 5, 50)


# --- corpus -----------------------------------------------------------------------------------------------------


def test_standard_library_is_real_text_split_by_file() -> None:
    corpus = open_corpus(DataSpec())
    names = [source.name for source in corpus.sources]
    assert names == sorted(names) and {"abc.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert "asyncio" in folders and not folders & {"test", "tests", "site-packages"}
    held = [name for name in names if corpus.held_out(name)]
    assert 0.01 < len(held) / len(names) < 0.12
    document = next(document for document in corpus.documents() if document.name == "abc.py")
    assert "class ABCMeta" in document.text
    assert not any(Path(name).is_absolute() for name in names)


def test_split_depends_on_the_name_alone(tmp_path: Path) -> None:
    many = open_corpus(DataSpec(source=str(_folder(tmp_path / "many", 400)), validation=0.1))
    held = {document.name for document in many.documents() if many.held_out(document.name)}
    for name in list(held)[:5]:
        (tmp_path / "many" / name).write_text("changed")
    (tmp_path / "many" / "zzz.txt").write_text("another")
    again = open_corpus(DataSpec(source=str(tmp_path / "many"), validation=0.1))
    assert {document.name for document in again.documents() if again.held_out(document.name)} - {"zzz.txt"} == held
    assert 15 < len(held) < 70


@pytest.mark.parametrize("count", [1, 2, 19, 20, 199])
def test_few_documents_still_give_both_splits(tmp_path: Path, count: int) -> None:
    corpus = open_corpus(DataSpec(source=str(_folder(tmp_path, count)), validation=0.05))
    documents = list(corpus.documents())
    held = [document for document in documents if corpus.held_out(document.name)]
    assert 0 < len(held) <= max(1, round(0.2 * len(documents)))
    assert "".join(document.text for document in documents) == "".join(_texts(count))
    assert len({document.name for document in documents}) == len(documents)


def test_no_validation_leaves_documents_whole(tmp_path: Path) -> None:
    corpus = open_corpus(DataSpec(source=str(_folder(tmp_path, 1)), validation=0))
    assert [document.text for document in corpus.documents()] == _texts(1)
    assert not corpus.held_out("0000.txt")


def _write_forms(root: Path, texts: list[str]) -> dict[str, str]:
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
    table = arrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, root / "rows.parquet", row_group_size=7)
    saved = root / "saved"
    saved.mkdir()
    half = len(texts) // 2
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        with arrow.ipc.new_stream(saved / f"data-{number:05d}-of-00002.arrow", table.schema) as writer:
            writer.write_table(part, max_chunksize=5)
    (saved / "dataset_info.json").write_text('{"features": {}}')
    files = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in range(2)]
    (saved / "state.json").write_text(json.dumps({"_fingerprint": "x", "_data_files": files}))
    several = root / "several"
    several.mkdir()
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    os.symlink(saved, several / "train")
    folder = _folder(root / "texts", 0)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (folder / ".hidden").write_text("no")
    return {"jsonl": "rows.jsonl", "parquet": "rows.parquet", "saved": "saved", "several": "several", "folder": "texts",
            "glob": "texts/*.txt"}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "several", "folder", "glob"])
def test_every_form_of_corpus_gives_the_same_texts(tmp_path: Path, form: str) -> None:
    texts = _texts(41)
    forms = _write_forms(tmp_path, texts)
    corpus = open_corpus(DataSpec(source=forms[form]), base=tmp_path)
    documents = list(corpus.documents())
    assert [document.text for document in documents] == texts
    assert not any(str(tmp_path) in document.name for document in documents)


def test_text_that_is_not_utf8_is_read_with_marks(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfplain")
    corpus = open_corpus(DataSpec(source=str(tmp_path), validation=0))
    assert [document.text for document in corpus.documents()] == ["caf\ufffd au lait", "plain"]


def test_a_huge_text_file_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.runtime.data.corpus.TEXT_PART_BYTES", 1000)
    text = "".join(f"line {number} é\n" for number in range(500))
    (tmp_path / "big.txt").write_text(text)
    parts = list(open_corpus(DataSpec(source="big.txt", validation=0), base=tmp_path).documents())
    assert len(parts) > 4 and "".join(part.text for part in parts) == text
    assert all(part.text.endswith("\n") for part in parts)


def _refused(spec: DataSpec, base: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        list(open_corpus(spec, base=base).documents())
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_bad_corpora_are_refused_with_place_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"title": "a", "body": "b"}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "list.jsonl").write_text('[1]\n')
    parquet.write_table(arrow.table({"title": ["a"], "year": [1]}), tmp_path / "rows.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not one")
    (tmp_path / "broken.arrow").write_bytes(b"nothing of the kind")
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\0\0\0")
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    _refused(DataSpec(source="nowhere"), tmp_path, "nowhere", "stdlib")
    _refused(DataSpec(source="empty"), tmp_path, "empty")
    _refused(DataSpec(source="blank.txt"), tmp_path, "empty", "blank.txt")
    _refused(DataSpec(source="rows.jsonl"), tmp_path, "rows.jsonl line 1", "'text'", "title, body", "data.field")
    _refused(DataSpec(source="torn.jsonl", validation=0), tmp_path, "torn.jsonl line 2", "not JSON")
    _refused(DataSpec(source="number.jsonl"), tmp_path, "line 1", "int")
    _refused(DataSpec(source="list.jsonl"), tmp_path, "line 1", "list")
    _refused(DataSpec(source="rows.parquet"), tmp_path, "rows.parquet", "title, year")
    _refused(DataSpec(source="rows.parquet", field="year"), tmp_path, "int64", "text columns: title")
    _refused(DataSpec(source="broken.parquet"), tmp_path, "broken.parquet", "parquet")
    _refused(DataSpec(source="broken.arrow"), tmp_path, "broken.arrow", "arrow")
    _refused(DataSpec(source="binary.txt"), tmp_path, "binary.txt", "not text")
    _refused(DataSpec(source="dict"), tmp_path, "a, b", "train")
    _refused(DataSpec(validation=1.0), tmp_path, "data.validation", "1.0")


# --- tokenizers -------------------------------------------------------------------------------------------------


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_byte_level_is_lossless_and_equal_to_its_own_json(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end]) == text
    assert tokenizer.backend.encode(text, add_special_tokens=False).ids == ids.tolist()


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(_texts(60), 300)


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_bpe_is_lossless(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= token < bpe.size for token in ids) and bpe.end not in ids


def test_bpe_compresses_and_is_the_same_every_time(bpe: Tokenizer) -> None:
    assert bpe.size == 300
    assert len(bpe.encode(WORDS)) < 0.7 * len(WORDS.encode())
    assert train_bpe(_texts(60), 300).digest == bpe.digest
    assert train_bpe(["other words make other tokens\n"] * 9, 300).digest != bpe.digest


def test_end_mark_written_in_a_document_is_plain_text(bpe: Tokenizer) -> None:
    assert bpe.end not in bpe.encode(f"a {END} b") and bpe.decode(bpe.encode(f"a {END} b")) == f"a {END} b"


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_saved_tokenizers_come_back_and_transformers_reads_them(tmp_path: Path, bpe: Tokenizer, kind: str) -> None:
    import transformers

    tokenizer = byte_level() if kind == "byte" else bpe
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = make_tokenizer(TokenizerSpec(kind="path", path=str(path)), ())
        assert (again.digest, again.size, again.end) == (tokenizer.digest, tokenizer.size, tokenizer.end)
        assert again.encode(WORDS).tolist() == tokenizer.encode(WORDS).tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(WORDS)["input_ids"] == tokenizer.encode(WORDS).tolist()
    assert theirs.decode(tokenizer.encode(WORDS).tolist()) == WORDS
    assert theirs.eos_token_id == tokenizer.end and len(theirs) == tokenizer.size


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "void").mkdir()
    for spec, word in ((TokenizerSpec(kind="words"), "words"), (TokenizerSpec(kind="path"), "path"),
                       (TokenizerSpec(kind="path", path=str(tmp_path)), "tokenizer.json"),
                       (TokenizerSpec(kind="path", path=str(tmp_path / "void")), "void"),
                       (TokenizerSpec(kind="path", path=str(tmp_path / "none")), "none"),
                       (TokenizerSpec(kind="bpe", vocabulary=100), "257")):
        with pytest.raises(DataError, match=word):
            make_tokenizer(spec, ["text"])
    with pytest.raises(DataError, match="257"):
        byte_level().check_vocabulary(256)
    byte_level().check_vocabulary(257)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="eos_token"):
        load_tokenizer(tmp_path)


# --- packing ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    root = tmp_path_factory.mktemp("packed")
    return prepare(DataSpec(source=str(_folder(root / "texts")), validation=0.1), 32, root / "cache")


def test_packed_tokens_are_the_documents_with_ends(packed: Packed) -> None:
    ends = [int((packed.tokens(split) == packed.tokenizer.end).sum()) for split in ("train", "validation")]
    assert ends == [packed.facts.train.documents, packed.facts.validation.documents]
    assert sum(ends) == 300 and ends[1] > 5
    text = bytes(int(token) for token in packed.tokens("train") if token != 256).decode()
    held = bytes(int(token) for token in packed.tokens("validation") if token != 256).decode()
    assert text.startswith(_texts(1)[0]) or held.startswith(_texts(1)[0])
    assert len(text) + len(held) == sum(map(len, _texts(300)))
    assert packed.facts.dtype == "uint16"


def test_sequences_overlap_by_one_and_cover_all(packed: Packed) -> None:
    length = 32
    batches = PackedBatches(packed, seed=3, global_batch=8, sequence_length=length)
    total = batches.sequences("train")
    row = np.asarray(packed.tokens("train")).astype(np.int64)
    assert total == (len(row) - 1) // length
    seen: dict[int, np.ndarray] = {}
    for step in range(-(-total // 8)):
        part = batches.microbatch("train", step, 0, 8)
        assert part["tokens"].dtype == part["targets"].dtype == torch.int64
        assert part["tokens"].shape == part["targets"].shape == (8, length)
        ids = batches.ids("train", step, 0, 8)
        for sample, tokens, targets in zip(ids, part["tokens"], part["targets"], strict=True):
            assert np.array_equal(tokens, row[sample * length:(sample + 1) * length])
            assert np.array_equal(targets, row[sample * length + 1:(sample + 1) * length + 1])
            seen[sample] = targets.numpy()
    assert np.array_equal(np.concatenate([seen[sample] for sample in range(total)]), row[1:total * length + 1])


def test_microbatches_do_not_depend_on_who_asks(packed: Packed) -> None:
    batches = PackedBatches(packed, seed=3, global_batch=12, sequence_length=16)
    whole = batches.microbatch("train", 5, 0, 12)["tokens"]
    for cuts in ((0, 4, 8, 12), (0, 1, 7, 12)):
        parts = [batches.microbatch("train", 5, low, high - low)["tokens"]
                 for low, high in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
    other = PackedBatches(packed, seed=4, global_batch=12, sequence_length=16)
    assert not torch.equal(other.microbatch("train", 5, 0, 12)["tokens"], whole)
    held = batches.microbatch("validation", 0, 0, 4)["tokens"]
    for same in (batches.microbatch("validation", 9, 0, 4), other.microbatch("validation", 0, 0, 4)):
        assert torch.equal(same["tokens"], held)


def test_cache_is_used_again_and_follows_the_files(tmp_path: Path) -> None:
    spec = DataSpec(source=str(_folder(tmp_path / "texts", 30)), tokenizer=TokenizerSpec(kind="bpe", vocabulary=280))
    first = prepare(spec, 16, tmp_path / "cache")
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    assert (prepare(spec, 8, tmp_path / "cache").folder / "train.bin").stat().st_mtime_ns == stamp
    (tmp_path / "texts" / "0001.txt").write_text("something else entirely")
    second = prepare(spec, 16, tmp_path / "cache")
    assert second.folder != first.folder and second.facts.digest != first.facts.digest
    (second.folder / "train.bin").write_bytes(b"cut short")
    with pytest.raises(DataError, match=r"train\.bin has 9 bytes"):
        open_packed(second.folder)
    assert prepare(spec, 16, tmp_path / "cache").facts == second.facts
    tokens = np.memmap(second.folder / "train.bin", dtype=np.uint16, mode="r+")
    tokens[3] ^= 1
    tokens.flush()
    with pytest.raises(DataError, match="has changed"):
        open_packed(second.folder, verify=True)
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_facts_are_the_same_wherever_the_corpus_lies(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="bpe", vocabulary=280)
    facts = [prepare(DataSpec(source=str(_folder(tmp_path / place / "texts", 30)), tokenizer=spec), 16,
                     tmp_path / place / "cache").facts for place in ("here", "there")]
    assert facts[0] == facts[1] and facts[0].digest == facts[1].digest


def _prepare_in_process(source: str, cache: str) -> None:
    prepare(DataSpec(source=source), 16, cache)


def test_processes_that_prepare_at_once_agree(tmp_path: Path) -> None:
    source, cache = str(_folder(tmp_path / "texts", 30)), str(tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_prepare_in_process, args=(source, cache)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 1 and open_packed(folders[0], verify=True).facts.train.documents > 0


def test_a_sequence_longer_than_the_corpus_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    spec = DataSpec(source=str(_folder(tmp_path / "texts", 30)))
    with pytest.raises(DataError) as caught:
        prepare(spec, 100_000, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()  # what is refused leaves nothing behind
    tokens = prepare(spec, 8, tmp_path / "cache").facts.train.tokens
    for word in (str(tokens), "100001", "job.sequence_length"):
        assert word in str(caught.value)
    with pytest.raises(DataError, match="validation split has only"):
        prepare(spec, 2000, tmp_path / "cache")
    prepare(DataSpec(source=spec.source, validation=0), 2000, tmp_path / "cache")


def test_machines_with_other_data_are_named(tmp_path: Path, packed: Packed) -> None:
    compare(packed.facts, packed.facts, "north")
    fewer = prepare(DataSpec(source=str(_folder(tmp_path / "fewer", 299)), validation=0.1), 16, tmp_path / "cache")
    with pytest.raises(DataError, match=r"machine north .*documents \d+ instead of \d+"):
        compare(fewer.facts, packed.facts, "north")
    changed = _folder(tmp_path / "changed")
    for path in changed.iterdir():
        path.write_text(path.read_text().replace("fox", "cat"))
    swapped = prepare(DataSpec(source=str(changed), validation=0.1), 16, tmp_path / "cache")
    with pytest.raises(DataError, match=r"machine south .*train token ids differ"):
        compare(swapped.facts, packed.facts, "south")
    bpe = TokenizerSpec(kind="bpe", vocabulary=280)
    other = prepare(DataSpec(source=str(changed), validation=0.1, tokenizer=bpe), 16, tmp_path / "cache")
    with pytest.raises(DataError, match=r"machine south .*tokenizer"):
        compare(other.facts, swapped.facts, "south")


def test_a_given_tokenizer_is_used(tmp_path: Path, bpe: Tokenizer) -> None:
    packed = prepare(DataSpec(source=str(_folder(tmp_path / "texts", 30))), 16, tmp_path / "cache", tokenizer=bpe)
    assert packed.facts.tokenizer == bpe.digest and packed.tokenizer.size == 300


# --- ledger -----------------------------------------------------------------------------------------------------


def _run(path: Path, first: int, last: int, *, batch: int, total: int, seed: int = 5) -> None:
    with Ledger(path, About(seed=seed, global_batch=batch, sequences=total), next_step=first) as ledger:
        for step in range(first, last):
            ledger.record(step, step * batch, samples(seed, step, batch, total))


@settings(max_examples=25)
@given(batch=st.integers(1, 30), total=st.integers(1, 50), stops=st.lists(st.integers(0, 12), max_size=3))
def test_ledger_proves_every_id_once_per_epoch_over_resumes(tmp_path_factory: pytest.TempPathFactory, batch: int,
                                                            total: int, stops: list[int]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    done = 0
    for stop in [*stops, 12]:
        first = min(stop, done)
        _run(path, first, max(first, stop), batch=batch, total=total)
        done = max(first, stop)
    proof = prove(path)
    assert (proof.steps, proof.samples) == (12, 12 * batch)
    assert (proof.epochs, proof.rest) == divmod(12 * batch, total)


def test_ledger_of_large_steps_keeps_digests(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _run(path, 0, 3, batch=IDS_KEPT + 1, total=700)
    assert read_ledger(path)[0][0].ids is None
    assert prove(path).steps == 3
    path.write_text(path.read_text().replace('"seed":5', '"seed":6'))
    with pytest.raises(DataError, match="seed 6"):
        prove(path)


def test_ledger_sees_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _run(path, 0, 6, batch=5, total=20)
    lines = path.read_text().splitlines(keepends=True)

    def wrong(changed: list[str], message: str) -> None:
        path.write_text("".join(changed))
        with pytest.raises(DataError, match=message):
            prove(path)

    said, *lines = lines
    assert about(path) == About(seed=5, global_batch=5, sequences=20)
    wrong(lines, "line 1: expected what the ledger is about")
    wrong([said, *lines[:2], *lines[3:]], "found step 3 at position 15, expected step 2")
    first = json.loads(lines[0])
    first["ids"][0], first["ids"][1] = first["ids"][1], first["ids"][0]
    wrong([said, json.dumps(first) + "\n", *lines[1:]], "line 2: step 0: the ids do not match")
    again = json.loads(lines[0]) | {"step": 1, "first": 5}
    wrong([said, lines[0], json.dumps(again) + "\n", *lines[2:]], "came twice in epoch 0")
    wrong(["not json\n", *lines[1:]], "line 1")
    wrong([said, "not json\n", *lines[1:]], "line 2")


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _run(path, 0, 4, batch=5, total=20)
    path.write_bytes(path.read_bytes()[:-7])
    assert len(read_ledger(path)[0]) == 3
    _run(path, 2, 6, batch=5, total=20)
    proof = prove(path)
    assert proof.steps == 6 and proof.rewound == 1
