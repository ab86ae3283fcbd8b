# The engine for a CPU (default) or a CUDA machine, x86-64 or aarch64; build from the repository's root.
#   BASE   a Debian or Ubuntu image; one with the CUDA runtime for a GPU
#   GPU    no: the CPU torch of constraints-cpu.txt; yes: the CUDA build pip finds (PIP_EXTRA_INDEX_URL may name another index)
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG GPU=no
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /src
# A python image brings its own Python with headers; a CUDA image brings none.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && if ! command -v python3; then apt-get install -y --no-install-recommends python3 python3-dev python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt constraints-cpu.txt ./
COPY ops/env.py ops/
RUN python3 ops/env.py engine --venv /opt/moorage --gpu ${GPU} --packages-only
COPY native native
COPY engine engine
COPY ops ops
RUN MOORAGE_VENV=/opt/moorage python3 ops/env.py engine

FROM ${BASE}
# gcc and Python's headers are Triton's: it compiles a small launcher for each kernel.
ARG GPU=no
RUN apt-get update \
    && apt-get install -y --no-install-recommends libstdc++6 \
    && if ! command -v python3; then apt-get install -y --no-install-recommends python3; \
        if [ "${GPU}" = yes ]; then apt-get install -y --no-install-recommends python3-dev; fi; fi \
    && if [ "${GPU}" = yes ]; then apt-get install -y --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home moorage \
    && install -d -o moorage -g moorage /var/lib/moorage/kv /models
COPY --from=build /opt/moorage /opt/moorage
WORKDIR /app
COPY --from=build /src/engine engine
COPY ops/demo_model ops/demo_model
ENV PYTHONUNBUFFERED=1 PYTHONPATH=/app
USER moorage
EXPOSE 8008
ENTRYPOINT ["/opt/moorage/bin/python", "-m", "engine.cli"]
CMD ["serve", "/app/ops/demo_model", "--name", "moorage-demo", "--host", "0.0.0.0", "--port", "8008", "--kv-disk", "/var/lib/moorage/kv"]
