# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The instructions that a full tile takes in the main loop of each kernel, from nvdisasm's listing."""

import collections
import re


def opcode(instruction):
    """Its name, without a predicate and what follows a dot."""
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0].split(".")[0]


class Block:
    """Instructions of which all are issued once the first one is, and the blocks that may follow."""

    def __init__(self):
        self.labels = []
        self.instructions = []
        self.next = []

    def count(self, *opcodes):
        return sum(opcode(i) in opcodes for i in self.instructions)


def kernels(listing):
    """(name, blocks) of every kernel."""
    name, blocks = None, []
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\S+):", line):
            if name:
                yield name, connected(blocks)
            name, blocks = match.group(1), [Block()]
        elif name and (match := re.match(r"\.(L_x_\d+):", line)):
            if blocks[-1].instructions:
                blocks.append(Block())
            blocks[-1].labels.append(match.group(1))
        elif name and (match := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", line)):
            blocks[-1].instructions.append(match.group(1))
            if opcode(match.group(1)) in ("BRA", "EXIT", "RET", "BRX", "JMP", "CALL"):
                blocks.append(Block())
    if name:
        yield name, connected(blocks)


def connected(blocks):
    places = {label: i for i, block in enumerate(blocks) for label in block.labels}
    for i, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else ""
        name = opcode(last) if last else ""
        target = re.search(r"`\(\.(L_x_\d+)\)", last)
        if name == "BRA" and target and target.group(1) in places:
            block.next.append(places[target.group(1)])
        falls_through = last.startswith("@") or name not in ("BRA", "EXIT", "RET") or "BRA.DIV" in last
        if falls_through and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def main_loop(blocks):
    """(first, last) block of the longest loop that reads operands of mma; None if there is none."""
    loops = [(to, i) for i, block in enumerate(blocks) for to in block.next
             if to <= i and any(b.count("LDSM") for b in blocks[to : i + 1])]
    return max(loops, key=lambda loop: loop[1] - loop[0], default=None)


def full_tile(blocks):
    """Opcodes with their numbers on the way through the main loop that has the most copies and reads of
    operands, and of those ways the fewest instructions: no rare branch is taken, everything is loaded and used."""
    first, last = main_loop(blocks)

    def value(block):
        return blocks[block].count("LDSM", "LDGSTS"), -len(blocks[block].instructions)

    best = {first: (value(first), None)}
    for i in range(first, last):
        for to in blocks[i].next if i in best else []:
            if i < to <= last:
                reached = tuple(a + b for a, b in zip(best[i][0], value(to)))
                if to not in best or reached > best[to][0]:
                    best[to] = (reached, i)
    counts, at = collections.Counter(), last
    while at is not None:
        counts.update(opcode(i) for i in blocks[at].instructions)
        at = best[at][1]
    return counts
