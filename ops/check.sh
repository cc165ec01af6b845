#!/usr/bin/env bash
# Check the deployment files with the tools of those who read them: compose, kustomize and the schemas of Kubernetes,
# the schema of SkyPilot, shellcheck, systemd, promtool. What is missing is installed, from Debian and PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

KUBERNETES=1.33
tools=build/ops-check

say() { printf '== %s\n' "$*"; }

need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null && return
    say "installing $2"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$2" >/dev/null
}

need shellcheck shellcheck
need kubectl kubernetes-client
need docker-compose docker-compose
need promtool prometheus
need chromium chromium # for the tests of the report
need systemd-analyze systemd
if [[ ! -e $tools/ready ]]; then
    say "installing kubernetes-validate and skypilot into $tools"
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet kubernetes-validate==1.37.0 skypilot==0.14.1
    touch "$tools/ready"
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say 'compose'
export GRAFANA_PASSWORD=any RUN_FILE=examples/qwen2.5-math-7b-8x80gb.toml RUN=any
docker-compose -f ops/compose/compose.yaml config --quiet
docker-compose -f ops/compose/compose.yaml -f ops/compose/compose.gpu.yaml config --quiet

say "kubernetes $KUBERNETES"
kubectl kustomize ops/kubernetes >"$scratch/kubernetes.yaml"
"$tools/bin/kubernetes-validate" --kubernetes-version "$KUBERNETES" --strict --quiet "$scratch/kubernetes.yaml"

say 'skypilot'
"$tools/bin/python" - ops/skypilot/run.yaml "$scratch" <<'PY'
import sys
from pathlib import Path

import jsonschema
import yaml
from sky.utils import schemas

task = yaml.safe_load(Path(sys.argv[1]).read_text())
jsonschema.validate(task, schemas.get_task_schema())
jsonschema.validate(task["resources"], schemas.get_resources_schema())
for script in ("setup", "run"):  # for shellcheck
    Path(sys.argv[2], f"skypilot-{script}.sh").write_text("#!/usr/bin/env bash\n" + task[script])
PY

say 'shell'
shellcheck ops/check.sh ops/slurm/*.sbatch "$scratch"/skypilot-*.sh

say 'systemd'
for unit in ops/systemd/*.service; do # the programs are not installed here
    sed 's#/opt/gvm-stream/bin/[a-z-]*#/bin/true#' "$unit" >"$scratch/$(basename "$unit")"
done
# It complains of wrong settings in words only.
systemd-analyze verify --man=no --recursive-errors=no \
    "$scratch"/gvm-stream-{allocator,learner}.service "$scratch/gvm-stream-producer@4.service" 2>&1 | tee "$scratch/systemd"
[[ ! -s $scratch/systemd ]]

say 'prometheus'
promtool check config ops/prometheus/prometheus.yml
(cd ops/prometheus && promtool test rules alerts.test.yml)
say 'all deployment files are well'
