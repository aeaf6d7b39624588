"""gRPC with mutual TLS, as wire and control use it: one server a process, identities read from certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from atoll.errors import WorkplaceError
from atoll.runtime.keys import Bundle

__all__ = ["NAME_KEY", "Server", "claimed_worker", "dial", "metadata", "reason_of", "refuse", "serve", "wait_ready"]

NAME_KEY = "atoll-worker"
"""Metadata of every call: the worker that calls; the certificate must be its machine's."""

Server = grpc.Server


def _options(max_message_bytes: int, keepalive_ns: int) -> list[tuple[str, int]]:
    keepalive_ms = max(100, keepalive_ns // 10**6)
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_frame_size", 1 << 20),
        ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the user's shell exports for the web
        ("grpc.so_reuseport", 0),  # a port in use must be an error, not a port shared with a stranger
        ("grpc.use_local_subchannel_pool", 1),
    ]


def serve(bundle: Bundle, bind: str, service: str, methods: Mapping[str, grpc.RpcMethodHandler], *, threads: int,
          max_message_bytes: int, keepalive_ns: int) -> tuple[Server, int]:
    """Start a server on ``bind`` ("host:port", port 0: any) that talks only to holders of the run's keys.

    Returns the server and its port. Raises ``WorkplaceError`` when the port is taken.
    """
    handler = grpc.method_handlers_generic_handler(service, methods)
    server = grpc.server(ThreadPoolExecutor(threads, thread_name_prefix=service), handlers=[handler],
                         options=_options(max_message_bytes, keepalive_ns))
    credentials = grpc.ssl_server_credentials([(bundle.key, bundle.certificate)], bundle.authority, require_client_auth=True)
    try:
        port = server.add_secure_port(bind, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise WorkplaceError(f"machine {bundle.machine}: cannot listen on {bind}: the port is in use or not allowed; "
                             "end the program that holds it or give the machine another port in the cluster")
    server.start()
    return server, port


def dial(bundle: Bundle, address: str, expected: str, *, max_message_bytes: int, keepalive_ns: int) -> grpc.Channel:
    """A channel to the server at ``address``, which must prove to be machine ``expected``."""
    credentials = grpc.ssl_channel_credentials(bundle.authority, bundle.key, bundle.certificate)
    options = [*_options(max_message_bytes, keepalive_ns), ("grpc.ssl_target_name_override", expected)]
    return grpc.secure_channel(address, credentials, options=options)


def wait_ready(channel: grpc.Channel, timeout_ns: int, check: Callable[[], None]) -> bool:
    """Whether the channel connects within the time; ``check`` is called in between and may raise."""
    ready = grpc.channel_ready_future(channel)
    slice_s = 0.05
    try:
        for _ in range(max(1, round(timeout_ns / 1e9 / slice_s))):
            check()
            try:
                ready.result(timeout=slice_s)
                return True
            except grpc.FutureTimeoutError:
                continue
        return False
    finally:
        ready.cancel()


def claimed_worker(context: grpc.ServicerContext, machines: Mapping[str, str]) -> str:
    """The worker that calls, as its certificate confirms; the call is refused otherwise. ``machines``: worker -> machine."""
    name = str(dict(context.invocation_metadata()).get(NAME_KEY, ""))
    proven = {value.decode(errors="replace") for value in context.auth_context().get("x509_subject_alternative_name", ())}
    if name not in machines:
        refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"a caller on machine {', '.join(sorted(proven))} says it is worker "
               f"{name[:64]!r}; the workers of this run are {', '.join(machines)}")
    if machines[name] not in proven:
        refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"a caller says it is worker {name!r} of machine {machines[name]}, "
               f"but its keys were made for machine {', '.join(sorted(proven))}")
    return name


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, sentence: str) -> NoReturn:
    context.abort(code, sentence)
    raise AssertionError("abort raises")


def reason_of(error: Any) -> str:
    """A short text for a failed call: the sentence the other side gave, or what happened to the connection."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS,
                grpc.StatusCode.FAILED_PRECONDITION):
        return str(details)
    first = details.splitlines()[0] if details else "no details"
    return f"the connection broke ({code.name.lower().replace('_', ' ')}: {first})"


def metadata(worker: str) -> Iterable[tuple[str, str]]:
    return ((NAME_KEY, worker),)
