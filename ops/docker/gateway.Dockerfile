# The gateway: no torch, no compiler. Multi-architecture; build from the repository's root.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt constraints-cpu.txt ./
COPY ops/env.py ops/
RUN python3 ops/env.py gateway --venv /opt/moorage --packages-only

FROM ${BASE}
RUN useradd --uid 10001 --create-home moorage \
    && install -d -o moorage -g moorage /var/lib/moorage/records
COPY --from=build /opt/moorage /opt/moorage
WORKDIR /app
COPY gateway gateway
COPY engine/__init__.py engine/protocol.py engine/
COPY ops/docker/gateway.yaml /etc/moorage/gateway.yaml
ENV PYTHONUNBUFFERED=1 PYTHONPATH=/app
USER moorage
EXPOSE 8100
ENTRYPOINT ["/opt/moorage/bin/python", "-m", "gateway.cli"]
CMD ["serve", "--config", "/etc/moorage/gateway.yaml"]
