# An image with this package and its examples, for one machine and for pods:
#
#   docker build -t ddp-runtime .                                  CPU
#   docker build -t ddp-runtime --build-arg CUDA=12 .              NVIDIA GPUs: the CUDA libraries come from wheels
#   docker run --shm-size=1g ddp-runtime ddp-launch -n 2 examples/train_digits.py
#
# EXTRAS is what of setup.cfg is installed; PYTHON is the tag of the official image.
ARG PYTHON=3.12

# A compiler, for the kernels of the CPU, is in the large image only.
FROM python:${PYTHON} AS build
WORKDIR /source
COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY collectives collectives
COPY ddp ddp
COPY launcher launcher
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# Empty, 12 or 13.
ARG CUDA=
ARG EXTRAS=mpich,examples,fsspec
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}${CUDA:+,cuda${CUDA}}]" ${CUDA:+"cupy-cuda${CUDA}x[ctk]"}
# The driver of the host, by the NVIDIA container runtime.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Ranks are an ordinary user's, and so is sshd, by which the launcher's pod reaches the others.
RUN useradd --create-home --uid 1000 mpiuser
COPY configs/kubernetes/ssh_config /etc/ssh/ssh_config.d/ddp.conf
COPY configs/kubernetes/sshd_config /etc/ssh/ddp_sshd_config
COPY --chown=mpiuser examples /home/mpiuser/examples
USER mpiuser
WORKDIR /home/mpiuser
CMD ["ddp-doctor"]
