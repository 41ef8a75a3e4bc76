"""A topology as a drawing: sockets as boxes, bridges as boxes in them, GPUs on the left, NICs on
the right, a line for each pair. Pure; SVG is written by hand, for a browser or a document.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from pdx.cli.topology_labels import Labels, rate
from pdx.host.topology import Distance, Gpu, Nic, Topology
from pdx.host.topology.tree import Branch, machine_tree

__all__ = ["draw"]

_DEVICE_WIDTH, _DEVICE_HEIGHT, _GAP = 264, 36, 8
#: Between the two columns of devices: room for the lines.
_CHANNEL = 130
_PAD, _TITLE = 12, 24
#: Nested boxes step in by this.
_INSET = 10
_LEGEND = 58
_COLOURS = {
    Distance.SWITCH: "#1a7f37",
    Distance.HOST_BRIDGE: "#0969da",
    Distance.NUMA: "#8250df",
    Distance.OTHER_NUMA: "#bc4c00",
    Distance.UNKNOWN: "#57606a",
}
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.small { font-size: 10.5px; fill: #57606a; }
.box { fill: #f6f8fa; stroke: #d0d7de; }
.inner { fill: #ffffff; stroke: #d0d7de; }
.gpu { fill: #dafbe1; stroke: #1a7f37; }
.nic { fill: #ddf4ff; stroke: #0969da; }
.unused { fill: #f6f8fa; stroke: #d0d7de; stroke-dasharray: 4 3; }
.pair { fill: none; stroke-width: 2; stroke-opacity: 0.85; }
"""


def draw(topology: Topology) -> str:
    """The drawing as a standalone SVG document."""
    return _Drawing(topology).document()


class _Drawing:
    """Boxes from the top down; two sockets stand side by side."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._labels = Labels(topology)
        self._cpus = {
            group.gpu.place.address: worker.cpu
            for group, worker in zip(topology.groups, topology.workers, strict=True)
            if group.gpu is not None
        }
        self._shapes: list[str] = []
        #: Where lines begin and end, by address and by name.
        self._gpu_ports: dict[str, tuple[float, float]] = {}
        self._nic_ports: dict[str, tuple[float, float]] = {}

    def document(self) -> str:
        trees = [tree for tree in machine_tree(self._topology.machine) if self._matters(tree)]
        depth = max((_depth(tree) for tree in trees), default=1)
        inner = 2 * _DEVICE_WIDTH + _CHANNEL
        column = inner + 2 * (_PAD + depth * _INSET)
        bottoms = [float(_LEGEND), float(_LEGEND)]
        num_columns = 2 if len(trees) > 1 else 1
        for tree in trees:
            side = bottoms.index(min(bottoms[:num_columns]))
            left = _PAD + side * (column + 2 * _PAD)
            bottoms[side] = self._branch(tree, left, bottoms[side], column, 0) + 2 * _PAD
        self._pairs()
        width = num_columns * (column + 2 * _PAD)
        return self._wrap(width, max(bottoms))

    def _matters(self, tree: Branch) -> bool:
        """Loopback and the like are drawn only where they serve something."""
        return bool(tree.branches or tree.gpus) or any(map(self._labels.serves, tree.nics))

    def _branch(self, branch: Branch, x: float, y: float, width: float, depth: int) -> float:
        """Draw a box with all that is in it; returns its lower edge."""
        slot = len(self._shapes)
        self._text(x + _PAD, y + 17, branch.title, "title" if depth == 0 else "")
        top = y + _TITLE + 2
        top = self._devices(branch, x, top, width, depth)
        for each in branch.branches:
            top = self._branch(each, x + _INSET, top, width - 2 * _INSET, depth + 1) + _GAP
        bottom = max(top, y + _TITLE + _GAP)
        kind = "box" if depth % 2 == 0 else "inner"
        box = _rect(x, y, width, bottom - y, kind, radius=8)
        self._shapes.insert(slot, box)
        return bottom

    def _devices(self, branch: Branch, x: float, y: float, width: float, depth: int) -> float:
        step = _DEVICE_HEIGHT + _GAP
        # All devices of a socket stand in two columns, however deep they are nested.
        inset = (width - 2 * _DEVICE_WIDTH - _CHANNEL) / 2
        for n, gpu in enumerate(branch.gpus):
            self._gpu(gpu, x + inset, y + n * step)
        for n, nic in enumerate(branch.nics):
            self._nic(nic, x + width - inset - _DEVICE_WIDTH, y + n * step)
        return y + step * max(len(branch.gpus), len(branch.nics))

    def _gpu(self, gpu: Gpu, x: float, y: float) -> None:
        name = f"{self._labels.short_gpu(gpu)}  {gpu.place.address}"
        style = "gpu" if gpu.problem is None else "unused"
        cpu = self._cpus.get(gpu.place.address)
        facts = gpu.problem or gpu.model or "NVIDIA GPU"
        self._device(x, y, style, name, facts if cpu is None else f"{facts}, worker: CPU {cpu}")
        self._gpu_ports[gpu.place.address] = (x + _DEVICE_WIDTH, y + _DEVICE_HEIGHT / 2)

    def _nic(self, nic: Nic, x: float, y: float) -> None:
        name = nic.name if nic.address in (None, nic.name) else f"{nic.name}  {nic.address}"
        facts = nic.problem or " ".join(filter(None, (nic.model, rate(nic))))
        style = "nic" if self._labels.serves(nic) else "unused"
        self._device(x, y, style, name, facts)
        self._nic_ports[nic.name] = (x, y + _DEVICE_HEIGHT / 2)

    def _device(self, x: float, y: float, style: str, name: str, facts: str) -> None:
        self._shapes.append(_rect(x, y, _DEVICE_WIDTH, _DEVICE_HEIGHT, style, radius=5))
        self._text(x + 8, y + 15, _cut(name, 34), "")
        self._text(x + 8, y + 29, _cut(facts, 42), "small")

    def _pairs(self) -> None:
        for group in self._topology.groups:
            start = None if group.gpu is None else self._gpu_ports.get(group.gpu.place.address)
            for choice in group.nics:
                end = self._nic_ports.get(choice.nic.name)
                if start is not None and end is not None:
                    self._shapes.append(_curve(start, end, _COLOURS[choice.distance], choice.why))

    def _text(self, x: float, y: float, text: str, style: str) -> None:
        kind = f' class="{style}"' if style else ""
        self._shapes.append(f'<text x="{x:g}" y="{y:g}"{kind}>{escape(text)}</text>')

    def _wrap(self, width: float, height: float) -> str:
        used = {choice.distance for group in self._topology.groups for choice in group.nics}
        legend = [f'<text x="{_PAD}" y="22" class="title">{escape(self._headline())}</text>']
        x = float(_PAD)
        for distance, colour in _COLOURS.items():
            if distance in used and self._topology.machine.gpus:
                legend.append(
                    f'<path d="M{x:g} 40h28" class="pair" stroke="{colour}"/>'
                    f'<text x="{x + 34:g}" y="44">{distance.value}</text>'
                )
                x += 170
        body = "\n".join([*legend, *self._shapes])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}">\n<style>{_STYLE}</style>\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
        )

    def _headline(self) -> str:
        groups = self._topology.groups
        if groups[0].gpu is None:
            return groups[0].why
        chosen = {choice.nic.name for group in groups for choice in group.nics}
        gpus = "1 GPU" if len(groups) == 1 else f"{len(groups)} GPUs"
        ours = sum(group.gpu is not None and group.gpu.problem is None for group in groups)
        whose = "" if ours == len(groups) else f" ({ours} for this process)"
        return f"{gpus}{whose}, served by {len(chosen)} NIC{'' if len(chosen) == 1 else 's'}"


def _depth(branch: Branch) -> int:
    return 1 + max((_depth(each) for each in branch.branches), default=0)


def _rect(x: float, y: float, width: float, height: float, style: str, radius: int) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
        f'class="{style}"/>'
    )


def _curve(start: tuple[float, float], end: tuple[float, float], colour: str, why: str) -> str:
    (x1, y1), (x2, y2) = start, end
    bend = max(abs(x2 - x1) / 2, 40)
    path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    return f'<path d="{path}" class="pair" stroke="{colour}"><title>{escape(why)}</title></path>'


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
