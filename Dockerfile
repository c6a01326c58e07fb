# The proxy: small, no torch, no model. Keys that are not given are made on the first start, shown once and kept on the volume:
#
#   docker build -t steno . && docker run -p 8080:8080 -v steno:/var/lib/steno steno

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements/proxy.txt requirements/proxy.txt
# Two environments: what runs holds no build tools.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-cache-dir setuptools==84.2.1 wheel==0.48.0 \
    && python3 -m venv /opt/steno \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps -r requirements/proxy.txt
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY inference_worker inference_worker
COPY trainer_bridge trainer_bridge
COPY steno steno
RUN /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/steno/bin/python -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/steno/bin/python -m pip uninstall --yes pip \
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
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"STENO_PORT\"]}/healthz', timeout=2)"]
ENTRYPOINT ["steno"]
CMD ["proxy"]
