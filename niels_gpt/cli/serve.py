"""`niels-gpt serve`: OpenAI's API over runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from niels_gpt.cli.options import (
    RUNS,
    Count,
    DeviceOption,
    OptionalPath,
    RunsDirOption,
    Text,
    WeightsOption,
    check_runs,
    choice_option,
    complete_runs,
    output_option,
)

KEY_VARIABLE = "NIELS_GPT_API_KEY"


def serve(
    runs: Annotated[
        Optional[list[Path]],  # noqa: UP045 (typer reads it at run time)
        typer.Argument(
            metavar="[RUN]...",
            callback=check_runs,
            autocompletion=complete_runs,
            show_default=False,
            help="Runs, pipelines (all trained phases) or checkpoints; default: the newest in runs/.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; all but those of this machine need an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")] = 8000,
    api_key: Annotated[
        Text,
        typer.Option(
            "--api-key", envvar=KEY_VARIABLE, show_envvar=True, show_default=False, help="Key that requests need."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str],
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Site whose pages may use the server (CORS), such as http://localhost:3000; may be repeated.",
        ),
    ] = [],  # noqa: B006
    allow_host: Annotated[
        list[str],
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Name by which clients may reach the server besides localhost, such as host.docker.internal; "
            "may be repeated.",
        ),
    ] = [],  # noqa: B006
    slots: Annotated[int, typer.Option("--slots", min=1, max=4096, help="Replies of a model at a time.")] = 32,
    queue: Annotated[int, typer.Option("--queue", min=0, max=100_000, help="Replies that may wait for a slot.")] = 128,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=1_000_000, help="Longest reply; requests for more are cut.")
    ] = 4096,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, max=1e6, help="Longest time of a request, in seconds.")
    ] = 300.0,
    prefix_tokens: Annotated[
        Count,
        typer.Option(
            "--prefix-tokens",
            min=0,
            show_default=False,
            help="Tokens of earlier prompts and replies to keep, so that they are not computed again; default: "
            "as many as all slots hold.",
        ),
    ] = None,
    context_overflow: Annotated[
        str,
        choice_option(
            "--context-overflow",
            ("half", "slide"),
            "half or slide: a reply past the context drops its older half, or recomputes the window for every token.",
        ),
    ] = "half",
    access_log: Annotated[
        OptionalPath, output_option("--access-log", "File of the access log; default: standard error.")
    ] = None,
    runs_dir: RunsDirOption = RUNS,
    device: DeviceOption = "auto",
    weights: WeightsOption = "float32",
) -> None:
    """Serve runs over HTTP: a page to chat with them and look inside, and OpenAI's API; see docs/serve.md."""
    import contextlib
    import sys

    from niels_gpt.system.console import is_quiet

    try:
        from niels_gpt.serve.app import create_app
    except ModuleNotFoundError as err:
        raise ValueError(f"{err.name} is not installed: pip install 'niels-gpt[serve]'") from None
    from niels_gpt.serve.limits import Limits
    from niels_gpt.serve.model_worker import leave_cores_to_workers
    from niels_gpt.serve.page_routes import PAGE_ROUTERS, STATIC
    from niels_gpt.serve.runs_routes import runs_router
    from niels_gpt.serve.security import check_host, check_key, check_origin, is_loopback
    from niels_gpt.serve.served_model import load_models
    from niels_gpt.serve.server import address, bind, exiting_on_sigterm, run
    from niels_gpt.training.progress import say

    check_key(host, api_key)
    origins, hosts = [check_origin(origin) for origin in allow_origin], [check_host(name) for name in allow_host]
    threads = leave_cores_to_workers()
    limits = Limits(slots=slots, queue=queue, new_tokens=max_tokens, request_seconds=timeout)
    with contextlib.ExitStack() as stack:
        stack.enter_context(exiting_on_sigterm())
        listening = stack.enter_context(bind(host, port))
        models = load_models(
            runs or [_newest()],
            limits,
            device=device,
            int8=weights == "int8",
            prefix_tokens=prefix_tokens,
            context_overflow="half" if context_overflow == "half" else "slide",
            threads=threads,
        )
        log = None if is_quiet() else sys.stderr
        if access_log is not None:
            log = stack.enter_context(access_log.open("a", encoding="utf-8"))
        app = create_app(
            models,
            limits=limits,
            api_key=api_key,
            local=is_loopback(host),
            origins=origins,
            hosts=hosts,
            access_log=log,
            routers=[*PAGE_ROUTERS, runs_router(runs_dir)],
            static=STATIC,
        )
        url = address(listening)
        say(f"serving {', '.join(model.id for model in models)} on {url}/v1 (page: {url}/ )")
        run(app, listening, limits)


def _newest() -> Path:
    """Return the newest run or pipeline in runs/, and print which."""
    from niels_gpt.runs.loading import find_newest
    from niels_gpt.system.console import hint

    path = find_newest()
    hint(f"using {path}")
    return path
