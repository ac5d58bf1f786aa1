# An image that trains, labels and serves. For a CPU, or for GPUs:
#
#   docker build --tag indictune .
#   docker build --tag indictune:cuda --build-arg TORCH_INDEX= --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .
#
#   docker run indictune train recipes/sentiment/demo.yaml
#
# BASE is a Debian or Ubuntu whose python3 is 3.11, 3.12 or 3.13. Layers that change seldom come first.
ARG BASE=debian:12-slim
FROM ${BASE}
# Where torch comes from. Empty: the ordinary index, whose torch for Linux has CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of pyproject.toml: read s3:// and https://, and serve a classifier.
ARG EXTRAS="remote serve"

# DeepSpeed and Triton compile when they are first needed.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential ca-certificates python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/indictune
COPY pyproject.toml constraints.txt ./
# An older pip cannot build seqeval. constraints.txt has the version of torch.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/venv \
    && pip install --upgrade pip \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
RUN python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *(each for name in sys.argv[1:] for each in extras[name]), sep='\n')" \
        ${EXTRAS} > /opt/venv/requirements.txt \
    && DS_BUILD_OPS=0 pip install --constraint constraints.txt --requirement /opt/venv/requirements.txt

# Kubernetes compares the number of the user with `runAsNonRoot`, and gives it volumes by `fsGroup`.
RUN useradd --create-home --uid 10001 indictune \
    && install --directory --owner indictune /cache outputs
ENV HOME=/home/indictune HF_HOME=/cache/huggingface INDICTUNE_CACHE=/cache/indictune

COPY README.md ./
COPY accelerate_configs accelerate_configs
COPY ds_configs ds_configs
COPY recipes recipes
COPY scripts scripts
COPY indictune indictune
RUN pip install --no-deps --editable . && python -m compileall -q indictune

USER 10001
ENTRYPOINT ["indictune"]
