"""A simulated CUDA device, for errors that a GPU would show and a CPU does not: tests/simulated.

`device.cpp` gives a CPU build of PyTorch the devices `cuda:0` and `cuda:1` with separate memory, and `operators.cpp`
their operators, on the CPU's kernels. Fresh memory is filled with NaN, an operator raises if its tensors are on
different devices, and backwards run in autograd's device thread. `stand_ins.py` replaces the remaining functions of
`torch.cuda`, `communication.py` implements NCCL by gloo, and `kernels.py` has reference code for operators that exist
only for CUDA. DeepSpeed uses its CUDA accelerator. Every place where the host would wait for the device is counted
(`host_waits.py`).

The simulation changes the process permanently and must be installed before DeepSpeed and the package are imported:
`ranks.py` runs functions in new processes. tests/README.md lists the errors that it cannot show.
"""
