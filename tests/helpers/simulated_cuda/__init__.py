"""A simulated CUDA device, for what a GPU would find and a CPU cannot: tests/simulated.

`device.cpp` gives a CPU build of PyTorch devices `cuda:0` and `cuda:1` with memory of their own, `operators.cpp` what
they compute, on the CPU's kernels. Fresh memory is filled with nan, every operator raises where its tensors are on
different devices, backwards run in autograd's thread of the device. `stand_ins.py` are what `torch.cuda` is asked for
beside them, `communication.py` is NCCL, by gloo, and `kernels.py` are the operators that only CUDA has, as reference
code. DeepSpeed takes its CUDA accelerator. Every place where the host would wait for the device is counted
(`host_waits.py`).

It changes the process for good, and has to come before DeepSpeed and the package are imported: `ranks.py` runs a
function in processes of its own. What it cannot show is in tests/README.md.
"""
