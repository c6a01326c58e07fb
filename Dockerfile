# Three images from one file. Keys of the proxy that are not given are made on the first start, shown once and kept on the volume:
#
#   docker build -t steno . && docker run -p 8080:8080 -v steno:/var/lib/steno steno
#
#   proxy     the default: small, no torch, no model
#   worker    --target worker: an engine. By default the embedded one on CPU; --build-arg ENGINE=vllm brings vLLM for NVIDIA GPUs
#   trainer   --target trainer: DeepSpeed under torchrun. By default with torch for NVIDIA GPUs; --build-arg TORCH=cpu without.
#             --build-arg VLLM=0.32.0 brings vLLM, which `transport: nccl` needs on this side too

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements/proxy.txt requirements/proxy.txt
# Two environments: what runs holds no build tools.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-cache-dir setuptools==84.2.1 wheel==0.48.0 \
    && python3 -m venv /opt/steno \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/proxy.txt
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY inference_worker inference_worker
COPY trainer_bridge trainer_bridge
COPY rollouts rollouts
COPY adapters adapters
COPY steno steno
COPY steno_cli steno_cli
RUN /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/steno/bin/python -m pip uninstall --yes setuptools pip \
    && install -d -m 0700 -o 10001 -g 10001 /var/lib/steno

FROM python:3.11-slim-bookworm AS proxy
LABEL org.opencontainers.image.title="steno" \
      org.opencontainers.image.description="A recording proxy for agentic reinforcement learning" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/steno /opt/steno
COPY --from=build --chown=10001:10001 /var/lib/steno /var/lib/steno
ENV PATH=/opt/steno/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    STENO_HOST=0.0.0.0 \
    STENO_PORT=8080 \
    STENO_KEYS_DIR=/var/lib/steno
USER 10001:10001
WORKDIR /var/lib/steno
VOLUME /var/lib/steno
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=15s \
    CMD ["python3", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"STENO_PORT\"]}/healthz', timeout=5)"]
ENTRYPOINT ["steno"]
CMD ["proxy"]

# torch comes first: the pins below are the whole set beside it, and its own requirements would bring CUDA to where there is no GPU.
# Without hashes: torch's CPU build, and what vLLM and torch for GPUs bring (CUDA's packages among it).
FROM python:3.11-slim-bookworm AS worker-build
ARG ENGINE=transformers
ARG VLLM_VERSION=0.32.0
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY requirements/runtime.txt requirements/runtime.txt
RUN python3 -m venv /opt/steno \
    && torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/runtime.txt) \
    && awk '/^[^ ]/ { take = !/^torch==/ } take' requirements/runtime.txt >pins.txt \
    && sed -n 's/^\([A-Za-z0-9][^ ]*==[^ ]*\).*/\1/p' requirements/runtime.txt >versions.txt \
    && case "$ENGINE" in \
         transformers) /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --extra-index-url "$TORCH_CPU_INDEX" "torch==$torch+cpu" \
           && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r pins.txt ;; \
         vllm) /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/runtime.txt \
           && /opt/steno/bin/python -m pip install --no-cache-dir -r versions.txt "mistral-common>=1.11.6,<1.13" "vllm==$VLLM_VERSION" ;; \
         *) echo "ENGINE is transformers or vllm, not $ENGINE" >&2; exit 2 ;; \
       esac
COPY --from=build /wheels /wheels
RUN /opt/steno/bin/python -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/steno/bin/python -m pip uninstall --yes pip \
    && install -d -m 0700 -o 10001 -g 10001 /var/lib/steno

FROM python:3.11-slim-bookworm AS worker
ARG ENGINE=transformers
LABEL org.opencontainers.image.title="steno-worker" \
      org.opencontainers.image.description="An inference worker of Steno, the recording proxy for agentic reinforcement learning" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton, which vLLM brings, compiles at run time. Debian's own point releases say which version.
# hadolint ignore=DL3008
RUN if [ "$ENGINE" = vllm ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=worker-build /opt/steno /opt/steno
COPY --from=worker-build --chown=10001:10001 /var/lib/steno /var/lib/steno
# All that is written (downloads, compiled kernels, staged weights) is under the volume. LOGNAME: the user has no name to look up.
ENV PATH=/opt/steno/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/steno \
    LOGNAME=steno \
    TMPDIR=/var/lib/steno \
    STENO_WORKER_ENGINE=$ENGINE \
    STENO_WORKER_METRICS_HOST=0.0.0.0 \
    STENO_WORKER_METRICS_PORT=9100
USER 10001:10001
WORKDIR /var/lib/steno
VOLUME /var/lib/steno
EXPOSE 9100
STOPSIGNAL SIGTERM
# Its metrics answer once the engine is up, which takes minutes for a large model.
HEALTHCHECK --interval=15s --timeout=10s --start-period=900s \
    CMD ["python3", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"STENO_WORKER_METRICS_PORT\"]}/metrics', timeout=5)"]
ENTRYPOINT ["steno"]
CMD ["worker"]

FROM python:3.11-slim-bookworm AS trainer-build
ARG TORCH=cuda
ARG VLLM=
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY requirements/runtime.txt requirements/trainer.txt requirements/trackers.txt requirements/
# DeepSpeed comes as source, and its setup imports torch: built in this environment, without kernels.
RUN python3 -m venv /opt/steno \
    && torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/runtime.txt) \
    && awk '/^[^ ]/ { take = !/^torch==/ } take' requirements/runtime.txt >pins.txt \
    && sed -n 's/^\([A-Za-z0-9][^ ]*==[^ ]*\).*/\1/p' requirements/runtime.txt >versions.txt \
    && case "$TORCH" in \
         cpu) /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --extra-index-url "$TORCH_CPU_INDEX" "torch==$torch+cpu" ;; \
         cuda) /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/runtime.txt \
           && /opt/steno/bin/python -m pip install --no-cache-dir "torch==$torch" ;; \
         *) echo "TORCH is cuda or cpu, not $TORCH" >&2; exit 2 ;; \
       esac \
    && if [ -n "$VLLM" ]; then /opt/steno/bin/python -m pip install --no-cache-dir -r versions.txt "mistral-common>=1.11.6,<1.13" "vllm==$VLLM"; fi \
    && /opt/steno/bin/python -m pip install --no-cache-dir wheel==0.48.0 \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r pins.txt \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r requirements/trainer.txt \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/trackers.txt
COPY --from=build /wheels /wheels
RUN /opt/steno/bin/python -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/steno/bin/python -m pip uninstall --yes pip \
    && install -d -m 0700 -o 10001 -g 10001 /var/lib/steno

FROM python:3.11-slim-bookworm AS trainer
LABEL org.opencontainers.image.title="steno-trainer" \
      org.opencontainers.image.description="The trainer of Steno, the recording proxy for agentic reinforcement learning" \
      org.opencontainers.image.licenses="Apache-2.0"
# What Triton and DeepSpeed compile at run time: Adam over the host's memory too, which needs no CUDA compiler. Debian's own point releases say which version.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=trainer-build /opt/steno /opt/steno
COPY --from=trainer-build --chown=10001:10001 /var/lib/steno /var/lib/steno
# torchrun takes its own options from PET_…: PET_NPROC_PER_NODE=8, or `gpu` for as many ranks as GPUs; PET_NNODES and the like.
ENV PATH=/opt/steno/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/steno \
    LOGNAME=steno \
    TMPDIR=/var/lib/steno \
    PET_NPROC_PER_NODE=1 \
    STENO_TRAIN_METRICS_HOST=0.0.0.0 \
    STENO_TRAIN_METRICS_PORT=9101
USER 10001:10001
WORKDIR /var/lib/steno
VOLUME /var/lib/steno
EXPOSE 9101
STOPSIGNAL SIGTERM
# Its first rank's metrics answer once the model is loaded. Of several nodes only one has that rank: none is asked then.
HEALTHCHECK --interval=15s --timeout=10s --start-period=900s \
    CMD ["python3", "-c", "import os, urllib.request as u; os.environ.get('PET_NNODES', '1') != '1' or u.build_opener(u.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"STENO_TRAIN_METRICS_PORT\"]}/metrics', timeout=5)"]
# One node's ranks meet on loopback: torchrun would wait for minutes on a host whose own name nothing resolves. After `--` no option of
# ours is taken for the beginning of one of torchrun's.
ENTRYPOINT ["sh", "-c", "[ \"${PET_NNODES:-1}\" != 1 ] || export PET_LOCAL_ADDR=\"${PET_LOCAL_ADDR:-127.0.0.1}\"; exec python3 -m steno_cli.torchrun -m -- steno \"$@\"", "torchrun"]
CMD ["train"]

# What is built without --target.
FROM proxy
