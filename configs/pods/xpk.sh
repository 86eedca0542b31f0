#!/usr/bin/env bash
# A v5e-16 of a cluster that xpk has made: CLUSTER=... IMAGE=... configs/pods/xpk.sh
# The storage clusterkv-results is a Filestore that `xpk storage attach` has put at /results.
set -euo pipefail
xpk workload create --cluster "$CLUSTER" --workload clusterkv --docker-image "$IMAGE" \
  --tpu-type v5litepod-16 --max-restarts 50 --restart-on-exit-codes 75 \
  --command "clusterkv evaluate --distributed --mesh data=4,model=4 --suite ruler --lengths 16384 --data hub \
    --methods auto --budgets 1.0,0.5,0.25 --model /results/models/llama-3.1-8b \
    --output /results/ruler-llama-3.1-8b --cache-folder /results/programs"
