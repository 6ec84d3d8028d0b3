# vcore_ds on CUDA GPUs, with the versions of constraints.txt: docker build -t vcore_ds . (docs/gpu.md)
# devel: DeepSpeed looks for nvcc when it is imported, and Triton compiles a kernel's launcher when it is first used.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# rdma-core: without it NCCL does not see InfiniBand adapters.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc python3-dev python3-venv rdma-core \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH DS_BUILD_OPS=0

WORKDIR /opt/vcore_ds
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY vcore_ds vcore_ds
COPY launch_scripts launch_scripts
COPY ds_configs ds_configs
RUN pip install --no-cache-dir '.[eval,pictures]' -c constraints.txt

WORKDIR /workspace
