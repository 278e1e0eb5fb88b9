"""Keep the machine code of one GPU architecture in a shared library, and set that of all others to zero.

    python scripts/pack_torch_strip.py LIBRARY 90

The library is changed in place. The containers keep their headers, so that the driver finds its entry.
Raises ValueError, and writes nothing, if the section is not what it should be. scripts/pack_torch.sh
calls it.
"""

import re
import struct
import subprocess
import sys
from collections import Counter

MAGIC = 0xBA55ED50


def section(path: str) -> tuple[int, int]:
    table = subprocess.run(
        ["readelf", "-SW", path], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"\] \.nv_fatbin\s+\S+\s+\S+\s+(\S+)\s+(\S+)", table)
    return (int(found[1], 16), int(found[2], 16)) if found else (0, 0)


def main(path: str, keep: int) -> None:
    start, size = section(path)
    if not size:
        print(path, "has no GPU code")
        return
    with open(path, "rb") as file:
        data = bytearray(file.read())
    bytes_of = Counter()
    zero = []
    place, end = start, start + size
    while place < end:
        magic, version, header, length = struct.unpack_from("<IHHQ", data, place)
        if magic != MAGIC:
            # Containers are aligned to 8 bytes or more.
            if any(data[place : place + 8]):
                raise ValueError(f"{path}: no container at {place - start:#x} of the section")
            place += 8
            continue
        entry, stop = place + header, place + header + length
        while entry < stop:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            architecture = struct.unpack_from("<I", data, entry + 28)[0]
            if kind not in (1, 2, 16, 64) or not 50 <= architecture <= 130:
                raise ValueError(
                    f"{path}: kind {kind}, architecture {architecture} at {entry - start:#x}"
                )
            bytes_of[kind, architecture] += payload
            if (kind, architecture) != (2, keep):
                zero.append((entry + entry_header, payload))
            entry += entry_header + payload
        if entry != stop:
            raise ValueError(f"{path}: entries do not fill the container at {place - start:#x}")
        place = stop
    for begin, length in zero:
        data[begin : begin + length] = bytes(length)
    with open(path, "wb") as file:
        file.write(data)
    kinds = {1: "ptx", 2: "machine code"}
    for (kind, architecture), count in sorted(bytes_of.items()):
        verb = "keeps" if (kind, architecture) == (2, keep) else "drops"
        print(
            f"{path}: {verb} {count / 1e6:.1f} MB of {kinds.get(kind, kind)} for sm_{architecture}"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
