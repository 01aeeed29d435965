"""stubs.py SITE_PACKAGES: stand-ins for the CUDA libraries that PyPI's torch links and a run on a CPU never calls.

torch's libraries are asked which libraries and symbols they want; for each library that is not there, one is compiled
whose functions all answer with status 1, which CUDA's callers take for an error. Needs gcc, readelf and nm.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# libcuda is the driver's and comes with it or not at all; only libraries that are loaded on demand need it.
NVIDIA = re.compile(r"lib(?!cuda\.)(cu|nv|nccl)\w*\.so\.\d+")


def lines(*command: str | Path) -> list[str]:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout.splitlines()


def wanted_libraries(libraries: list[Path]) -> set[str]:
    """The NVIDIA libraries that the given ones name as needed."""
    found = set()
    for library in libraries:
        for line in lines("readelf", "--dynamic", "--wide", library):
            named = re.search(r"\(NEEDED\).*\[(.+)\]", line)
            if named and NVIDIA.fullmatch(named[1]):
                found.add(named[1])
    return found


def version_owners(libraries: list[Path]) -> dict[str, str]:
    """Which library each version of a symbol is from. NVIDIA mostly calls it as the library, and NVSHMEM does not."""
    owners, library = {}, ""
    for line in (line for p in libraries for line in lines("readelf", "--version-info", "--wide", p)):
        if named := re.search(r"\bFile: (\S+)", line):
            library = named[1]
        elif (named := re.search(r":\s+Name: (\S+)\s+Flags:", line)) and NVIDIA.fullmatch(library):
            owners[named[1]] = library
    return owners


def symbols(library: Path, kind: str) -> set[str]:
    """Dynamic symbols, undefined ones as `name` or `name@version`; weak ones may stay undefined and are left out."""
    rows = (line.split() for line in lines("nm", "--dynamic", f"--{kind}-only", library))
    return {row[-1] for row in rows if row[-2] not in ("w", "v")}


def owner(symbol: str, libraries: set[str]) -> str | None:
    """The library whose name a symbol without a version begins with: cusparseLtInit is libcusparseLt's, not libcusparse's."""
    best = None, 0
    for library in libraries:
        stem = library[3:].split(".")[0].removesuffix("_host").lower()
        if symbol.lower().startswith(stem) and len(stem) > best[1]:
            best = library, len(stem)
    return best[0]


def compile_stub(target: Path, version: str, versioned: set[str], plain: set[str]) -> None:
    name = target.name
    with tempfile.TemporaryDirectory() as work:
        source, versions = Path(work, "stub.c"), Path(work, "versions")
        source.write_text("".join(f"int {s}(void) {{ return 1; }}\n" for s in sorted(versioned | plain)))
        flags = []
        if versioned:
            versions.write_text(f"{version} {{ global: {' '.join(f'{s};' for s in sorted(versioned))} }};\n")
            flags = [f"-Wl,--version-script={versions}"]
        subprocess.run(
            ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{name}", *flags, "-o", str(target), str(source)],
            check=True,
        )


def main() -> None:
    site = Path(sys.argv[1])
    ours = sorted((site / "torch/lib").glob("lib*.so*"))
    theirs = sorted((site / "nvidia").glob("**/lib*.so*"))
    missing = wanted_libraries(ours) - {p.name for p in ours + theirs}
    undefined = set().union(*(symbols(p, "undefined") for p in ours))
    defined = {s.split("@")[0] for p in ours + theirs for s in symbols(p, "defined")}
    owners = version_owners(ours)
    versioned, plain = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if owners.get(version) in missing:
            versioned[owners[version]].add(name)
        elif not version and name not in defined:
            library = owner(name, missing)
            if library:
                plain[library].add(name)
    versions = {library: version for version, library in owners.items()}
    for name in sorted(missing):
        compile_stub(site / "torch/lib" / name, versions.get(name, ""), versioned[name], plain[name])
    print(f"stood in for {len(missing)} libraries with {sum(map(len, versioned.values())) + sum(map(len, plain.values()))} functions")


main()
