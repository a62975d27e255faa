"""Who is measured, and how each is started.

A peer here is one product with one setting: `vllm-w8a8` and `vllm-bf16` are two. Settings are
those that served each product best on two cores; `note` says what a reader must know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peer_models import form_path, peers_root

DRIVER = Path(__file__).with_name("openvino_driver.py")
MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Peer:
    """A server to measure.

    `command` is what starts it, from the model's name and the number of threads; host and port
    are appended, unless it `is_in_process`: then it speaks the driver's protocol on its pipes.
    """

    name: str
    product: str  # the name that install.py takes; empty for hotbatch itself
    form: str  # of the model, see peer_models.form_path; empty for the file as it is
    weights: str
    command: Callable[[str, int], list[str]]
    headers: dict[str, str] = field(default_factory=dict)
    is_in_process: bool = False
    clients: tuple[int, int] = (1, 1024)  # fewest and most it is measured with
    longest_prompt: int = 1 << 20  # beyond it takes minutes and no aim is set
    patience: float = 120.0  # seconds until healthy
    note: str = ""


# ---- hotbatch


def _hotbatch(*options: str, guesses: bool = False) -> Callable[[str, int], list[str]]:
    def command(model: str, threads: int) -> list[str]:
        source = (
            "smollm2-135m-instruct" if model == "smollm2-135m" else str(form_path(model, "F16"))
        )
        start = [sys.executable, "-m", "hotbatch.cli", "serve", source]
        # Greedy answers to random prompts repeat themselves, which is too easy to guess.
        guessing = ["--speculate-on", "tokens"] if guesses else ["--no-speculate"]
        return [*start, "--threads", str(threads), *guessing, *options]

    return command


# ---- llama.cpp and its fork


def llama_binary(product: str, tool: str) -> Path:
    return peers_root() / product / "build" / "bin" / tool


def _llamacpp(product: str, form: str, *options: str) -> Callable[[str, int], list[str]]:
    def command(model: str, threads: int) -> list[str]:
        start = [str(llama_binary(product, "llama-server")), "-m", str(form_path(model, form))]
        return [*start, "-t", str(threads), "-tb", str(threads), *options]

    return command


def _llamacpp_peer(form: str) -> Peer:
    return Peer(
        name=f"llamacpp-{form.lower()}",
        product="llamacpp",
        form=form,
        weights=form,
        command=_llamacpp("llamacpp", form, "-np", "32", "-c", "32768", "--alias", "peer"),
        headers={"Connection": "close"},
        longest_prompt=256,
        note="llama-server with 32 slots; a connection for each request, or some fail.",
    )


def _ik_peer(form: str) -> Peer:
    return Peer(
        name=f"ik-{form.lower()}",
        product="ik_llamacpp",
        form=form,
        weights=form,
        command=_llamacpp(
            "ik_llamacpp", form, "-np", "1", "-c", "8192", "-rtr", "-fa", "on", "--alias", "peer"
        ),
        headers={"Connection": "close"},
        clients=(1, 1),
        note="ik_llama.cpp: one slot; with more it aborts under flash attention.",
    )


# ---- OpenVINO GenAI


def _openvino(*options: str) -> Callable[[str, int], list[str]]:
    def command(model: str, threads: int) -> list[str]:
        python = peers_root() / "openvino" / "venv" / "bin" / "python"
        return [str(python), str(DRIVER), str(form_path(model, "openvino-int8")), *options]

    return command


# ---- vLLM


def _vllm(form: str) -> Callable[[str, int], list[str]]:
    def command(model: str, threads: int) -> list[str]:
        environment = peers_root() / "vllm" / "venv"
        settings = [
            "VLLM_CPU_KVCACHE_SPACE=3",
            f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}",
            "VLLM_NO_USAGE_STATS=1",
            "DO_NOT_TRACK=1",
            "HF_HUB_OFFLINE=1",
            f"VLLM_CACHE_ROOT={environment.parent / 'cache'}",
            f"PATH={environment / 'bin'}:{os.environ.get('PATH', '')}",
        ]
        if preload := vllm_preloads(environment):
            settings.append(f"LD_PRELOAD={preload}")
        start = ["env", *settings, str(environment / "bin" / "vllm"), "serve"]
        start += [str(form_path(model, form)), "--served-model-name", "peer"]
        return [*start, "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]

    return command


def vllm_preloads(environment: Path) -> str:
    """The libraries that vLLM's manual advises to preload, as far as they are there."""
    found = [
        next(iter(sorted(folder.glob(pattern))), None)
        for folder, pattern in (
            (Path("/usr/lib/x86_64-linux-gnu"), "libtcmalloc_minimal.so.4"),
            (environment / "lib", "libiomp5.so"),
        )
    ]
    return ":".join(str(path) for path in found if path is not None)


def _vllm_peer(name: str, form: str, weights: str) -> Peer:
    return Peer(
        name=name,
        product="vllm",
        form=form,
        weights=weights,
        command=_vllm(form),
        patience=900.0,
        note="vLLM for CPU, 3 GB of KV cache.",
    )


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "hotbatch",
            "",
            "",
            "int8",
            _hotbatch("--precision", "int8"),
            note="hotbatch without guesses, as its peers are.",
        ),
        Peer(
            "hotbatch-guessing",
            "",
            "",
            "int8",
            _hotbatch("--precision", "int8", guesses=True),
            note="hotbatch as it comes, guessing next tokens; greedy answers to random prompts "
            "repeat themselves, so texts of people gain less (speculation.md).",
        ),
        Peer(
            "hotbatch-int4",
            "",
            "",
            "int4",
            _hotbatch("--precision", "int4"),
            clients=(1, 1),
            note="hotbatch with 4-bit weights, for the row of one client.",
        ),
        _ik_peer("Q4_0"),
        _ik_peer("Q8_0"),
        _llamacpp_peer("Q4_0"),
        _llamacpp_peer("Q8_0"),
        Peer(
            "openvino-int8",
            "openvino",
            "openvino-int8",
            "int8",
            _openvino(),
            is_in_process=True,
            note="OpenVINO GenAI in process, no HTTP; 256 tokens a step as by default.",
        ),
        Peer(
            "openvino-int8-2048",
            "openvino",
            "openvino-int8",
            "int8",
            _openvino("--max-num-batched-tokens", "2048"),
            is_in_process=True,
            clients=(32, 1024),
            note="The same with 2,048 tokens a step, which is better for many clients.",
        ),
        _vllm_peer("vllm-w8a8", "w8a8", "int8, activations too"),
        _vllm_peer("vllm-bf16", "hf", "bf16"),
    )
}
DEFAULT_PEERS = tuple(name for name in PEERS if name != "vllm-bf16")


@dataclass(frozen=True)
class Workload:
    """Random prompts of `prompt` tokens, `output` tokens each, from `clients` at once."""

    prompt: int
    output: int
    clients: int

    @property
    def label(self) -> str:
        return f"{self.prompt}x{self.output}@{self.clients}"


def parse_workloads(specs: list[str]) -> list[Workload]:
    """`128x128@1,16` is two workloads.

    Raises:
        ValueError: a specification has another form; the message names it.
    """
    workloads = []
    for spec in specs:
        try:
            lengths, clients = spec.split("@")
            prompt, output = map(int, lengths.split("x"))
            counts = [int(count) for count in clients.split(",")]
        except ValueError:
            raise ValueError(f"{spec!r} is not a workload such as 128x128@1,16,32") from None
        if min(prompt, output - 1, *counts) < 1:
            raise ValueError(f"{spec!r}: a prompt and a client at least, and two tokens out")
        workloads += [Workload(prompt, output, count) for count in counts]
    return workloads


def is_measured(peer: Peer, workload: Workload) -> bool:
    low, high = peer.clients
    return low <= workload.clients <= high and workload.prompt <= peer.longest_prompt
