# On CPUs:          docker build -t memsave .
# On NVIDIA GPUs:   docker build -t memsave --build-arg BASE=pytorch/pytorch:TAG .   (of PyTorch 2.11 to 2.15)
#                   docker run --gpus all --ipc host -it memsave bash
# A base that has PyTorch keeps it. Any other gets the build of TORCH_INDEX.
ARG BASE=python:3.13-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
RUN python3 -c 'import torch' || python3 -m pip install 'torch>=2.11,<2.16' --index-url "$TORCH_INDEX"
COPY . /opt/memsave
RUN python3 -m pip install '/opt/memsave[all]' && useradd --uid 1001 --create-home memsave
USER 1001
WORKDIR /home/memsave
RUN memsave recipes --copy .
CMD ["memsave", "--help"]
