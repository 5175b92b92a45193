#!/usr/bin/env python3
"""Generate the Python code of every .proto under proto/leasekeeper into proto/gen.

The compiler lives in its own virtual environment (``.cache/protogen``), because the version that writes the
code must not move with the version that runs it: code of protoc 27 (grpcio-tools 1.66.2) loads on every
protobuf runtime from 5.27 to 7.x. Run with any Python 3.11+; needs network once, to fill the cache.

    scripts/gen_protos.py                         # regenerate proto/gen
    scripts/gen_protos.py --check                 # exit 1 and name the files that differ
    scripts/gen_protos.py --descriptor-set FILE   # also write a FileDescriptorSet with imports and comments
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
OUTPUT = PROTO_ROOT / "gen"
CACHE = ROOT / ".cache" / "protogen"
REQUIREMENTS = (
    "grpcio==1.66.2",
    "grpcio-tools==1.66.2",
    "protobuf==5.29.6",
    "mypy-protobuf==3.6.0",
    "types-protobuf==5.29.1.20250403",
    "googleapis-common-protos==1.66.0",
    "setuptools==75.8.2",
)
STAMP = "requirements.sha256"
_FIND_PACKAGE = """\
import importlib.util, sys
print(list(importlib.util.find_spec(sys.argv[1]).submodule_search_locations)[0])
"""


def compiler_python() -> Path:
    """Return the interpreter of the cached compiler environment, made afresh if it is not current."""
    wanted = hashlib.sha256("\n".join(REQUIREMENTS).encode()).hexdigest()
    python = CACHE / "bin" / "python"
    stamp = CACHE / STAMP
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    if CACHE.exists():
        shutil.rmtree(CACHE)
    venv.create(CACHE, with_pip=True)
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS],
        check=True,
        timeout=600,
    )
    stamp.write_text(wanted)
    return python


def include_path(python: Path, module: str) -> Path:
    """Return the folder that holds ``google/...`` protos in the compiler environment's *module* package."""
    found = subprocess.run(
        [str(python), "-c", _FIND_PACKAGE, module],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Path(found.stdout.strip())


def sources() -> list[Path]:
    """Return all our .proto files, sorted, relative to the proto folder."""
    return sorted(path.relative_to(PROTO_ROOT) for path in (PROTO_ROOT / "leasekeeper").rglob("*.proto"))


def generate(target: Path, descriptor_set: Path | None) -> None:
    """Generate messages, stubs and type stubs of all sources into *target*, an existing empty folder.

    Raises:
        SystemExit: the compiler refused a source; its own message went to stderr.
    """
    python = compiler_python()
    files = sources()
    if not files:
        raise SystemExit("no .proto files under proto/leasekeeper")
    command = [
        str(python),
        "-m",
        "grpc_tools.protoc",
        f"--plugin=protoc-gen-mypy={CACHE / 'bin' / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={CACHE / 'bin' / 'protoc-gen-mypy_grpc'}",
        f"-I{PROTO_ROOT}",
        f"-I{include_path(python, 'grpc_tools') / '_proto'}",
        f"-I{include_path(python, 'google.rpc').parent.parent}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
    ]
    if descriptor_set is not None:
        descriptor_set.parent.mkdir(parents=True, exist_ok=True)
        command += [f"--descriptor_set_out={descriptor_set}", "--include_imports", "--include_source_info"]
    done = subprocess.run([*command, *map(str, files)], cwd=PROTO_ROOT, check=False, timeout=300)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    for source in files:
        if "\nservice " not in "\n" + (PROTO_ROOT / source).read_text():
            stem = target / source.with_suffix("")
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                stem.with_name(stem.name + suffix).unlink(missing_ok=True)
    package_root = target / "leasekeeper"
    for folder in sorted({package_root, *(path.parent for path in package_root.rglob("*_pb2.py"))}):
        current = folder
        while current != target:
            (current / "__init__.py").touch()
            current = current.parent
    (package_root / "py.typed").touch()


def relative_files(folder: Path) -> set[str]:
    """Return the paths of all files under *folder*, without bytecode."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def differences(fresh: Path, committed: Path) -> list[str]:
    """Return the names of files that are missing, extra or different in *committed*, sorted."""
    left, right = relative_files(fresh), relative_files(committed)
    both = left & right
    changed = {name for name in both if not filecmp.cmp(fresh / name, committed / name, shallow=False)}
    return sorted((left ^ right) | changed)


def replace_output(fresh: Path) -> None:
    """Make proto/gen equal to *fresh*, touching only files that differ, so that builds see few changes."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in differences(fresh, OUTPUT):
        source, target = fresh / name, OUTPUT / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        else:
            target.unlink()


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate Python code from proto/leasekeeper.")
    parser.add_argument("--check", action="store_true", help="compare with proto/gen instead of writing it")
    parser.add_argument("--descriptor-set", type=Path, metavar="FILE", help="also write a FileDescriptorSet")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="protogen-") as folder:
        fresh = Path(folder)
        generate(fresh, options.descriptor_set.resolve() if options.descriptor_set else None)
        if options.check:
            names = differences(fresh, OUTPUT)
            for name in names:
                print(f"differs: proto/gen/{name}", file=sys.stderr)
            return 1 if names else 0
        replace_output(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
