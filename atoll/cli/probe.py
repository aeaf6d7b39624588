"""``atoll probe`` and ``atoll doctor``: what this machine is, what it can do, and whether it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.common import JsonOption, Output

if TYPE_CHECKING:
    from atoll.runtime.probe import MachineFacts
    from atoll.runtime.probe_links import LinkFacts

__all__ = ["doctor", "probe"]


def probe(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write cluster.yaml there.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this machine (default: its host name).")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="host:port of a machine that runs atoll probe --serve.")] = None,
    token: Annotated[str | None, typer.Option(help="The word that --serve printed there.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Answer the probes of other machines until interrupted.")] = False,
    port: Annotated[int | None, typer.Option(help="Port for --serve.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to load each link, each way.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine (matrix throughput by dtype, memory, disk) and, with peers, every link both ways.

    Two machines: run  atoll probe --serve  on one, then on the other the line below with the token it prints.

    Example:  atoll probe --peer 192.0.2.7:7701 --token WORD --out cluster.yaml
    """
    from atoll.errors import DocumentError
    from atoll.records import to_plain, write_atomically
    from atoll.runtime.probe import probe_machine, sentences
    from atoll.runtime.probe_document import cluster_document
    from atoll.runtime.probe_links import probe_links

    output = Output(as_json)
    if peer and not token:
        raise DocumentError("--peer: needs --token, the word that atoll probe --serve printed on the peer")
    output.show("measuring this machine ...")
    here = probe_machine(name)
    output.sentences(sentences(here))
    if serve:
        _serve(output, here, port, token)
        return
    facts = [here]
    links: list[LinkFacts] = []
    failed: list[str] = []
    if peer and token:
        output.show(f"measuring links to {', '.join(peer)} ...")
        others, links, failed = probe_links(here, peer, token, seconds=seconds)
        facts += others
        output.sentences(failed)
    document = cluster_document(facts, links, failed=failed)
    if out is not None:
        write_atomically(out, document)
        output.show(f"written: {out}")
    else:
        output.show_text("\n" + document)
    output.finish({"machines": to_plain(facts), "links": to_plain(links), "failed": failed, "cluster": document})


def _serve(output: Output, here: MachineFacts, port: int | None, token: str | None) -> None:
    from atoll.runtime.probe_links import PORT, Server

    with Server(here, port=PORT if port is None else port, token=token) as server:
        output.show(f"answering on port {server.port}; on the other machine run: "
                    f"atoll probe --peer THIS_HOST:{server.port} --token {server.token} --out cluster.yaml")
        output.finish({"port": server.port, "token": server.token})
        server.wait()


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine (PyTorch, devices, ports, memory, disk, clock, lab) and say what to do.

    Example:  atoll doctor
    """
    from rich.text import Text

    from atoll.lab.lab import obstacle
    from atoll.records import to_plain
    from atoll.runtime.doctor import examine

    output = Output(as_json)
    findings = examine(lab=obstacle)
    colours = {"good": "green", "hint": "yellow", "problem": "red"}
    for finding in findings:
        output.show(Text.assemble((f"{finding.level:<8}", colours[finding.level]), (finding.what, "bold"), f": {finding.found}",
                                  f" - {finding.remedy}" if finding.remedy else ""))
    output.finish({"findings": to_plain(findings), "ready": all(finding.level != "problem" for finding in findings)})
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(5)
