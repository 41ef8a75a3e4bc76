"""Runs passes as a rank with kernels does, and tells where its host would wait for a GPU.

python -m tests.runner.waits FOLDER, with PDX_KERNELS=interpret and TRITON_INTERPRET=1 (a process
of its own: whether kernels are interpreted is settled when Triton is imported). Prints JSON. The
last pass is one with a layer that does wait, to show that it is seen.

Between the copy that brings a pass to the device and the one that takes its tokens back, nothing
may ask for a number of the device, make a size of one, or copy from the host's ordinary memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdx.request.batch import Batch, RequestStart
from pdx.request.request import SamplingParams
from pdx.runner.device import RankDevice
from tests.runner.kernel_runner import kernel_runner, staged_cpu, steps

#: Of a tensor: what gives a number, or a size that is one, to the host.
METHODS = (
    *("item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "bincount"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
)
FUNCTIONS = ("tensor", "as_tensor", "from_numpy", "nonzero", "unique", "bincount", "masked_select")
ATEN = (
    *("item", "is_nonzero", "_local_scalar_dense", "equal"),
    *("nonzero", "masked_select", "_unique2", "unique_dim", "bincount"),
)


def ask(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """What a layer must not do."""
    inputs[0].max().item()


class Watch(TorchDispatchMode):
    """Notes calls by our code while a pass is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on_device = False
        self.waits: list[str] = []
        self.num_uploads = self.num_downloads = 0

    def note(self, name: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while self.is_on_device and frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("triton.") or module == "pdx.kernels.interpreter":
                return  # the interpreter reads the tensors of a launch
            if module.startswith("pdx.") or frame.f_code is ask.__code__:
                self.waits.append(f"{name} in {module}:{frame.f_lineno}")
                return
            frame = frame.f_back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in ATEN or by_mask:
            self.note(f"aten.{name}")
        return func(*args, **(kwargs or {}))

    def patch(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return original(*args, **kwargs)

        setattr(owner, name, noted)


def watched_device(watch: Watch) -> RankDevice:
    device = staged_cpu()
    assert device.staging is not None
    upload, download = device.staging.upload, device.download

    def counted_upload(arrays: Any) -> Any:
        watch.num_uploads += 1
        arrived = upload(arrays)
        watch.is_on_device = True
        return arrived

    def counted_download(values: Any) -> Any:
        watch.is_on_device = False
        watch.num_downloads += 1
        return download(values)

    device.staging.upload = counted_upload  # type: ignore[method-assign]
    device.download = counted_download  # type: ignore[method-assign]
    return device


def main() -> None:
    torch.set_num_threads(1)
    sampling = [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(
            max_tokens=9,
            temperature=0.8,
            top_k=20,
            top_p=0.9,
            min_p=0.01,
            seed=5,
            logprobs=3,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            logit_bias={7: 1.0},
            min_tokens=4,
            stop_token_ids=(0,),
        ),
    ]
    starts = [
        RequestStart(
            request_id=idx,
            token_ids=list(range(5, 9 + idx)),
            num_computed=0,
            first_output_idx=0,
            sampling=params,
        )
        for idx, params in enumerate(sampling)
    ]
    watch = Watch()
    runner = kernel_runner(Path(sys.argv[1]), watched_device(watch)).runner
    for name in METHODS:
        watch.patch(torch.Tensor, name)
    for name in FUNCTIONS:
        watch.patch(torch, name)
    passes = [
        (starts, steps(3, [[4], [2]], sample=False)),
        ([], [*steps(1, [[]], sample=True), *steps(2, [[], []], sample=True)[1:]]),
        ([], steps(1, [[], []], sample=True)),
        ([], steps(1, [[]], sample=False)),
    ]
    found = []
    with watch:
        for idx, (new, batch_steps) in enumerate(passes):
            watch.num_uploads = watch.num_downloads = 0
            watch.waits, watch.is_on_device = [], False
            if idx == len(passes) - 1:
                runner._model.model.norm.register_forward_pre_hook(ask)
            output = runner.execute(
                Batch(pass_idx=idx + 1, starts=new, steps=batch_steps, removes=[])
            )
            watch.is_on_device = False
            found.append(
                {
                    "waits": sorted(set(watch.waits)),
                    "uploads": watch.num_uploads,
                    "downloads": watch.num_downloads,
                    "tokens": [token.token_id for token in output.tokens],
                }
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
