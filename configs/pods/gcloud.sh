#!/usr/bin/env bash
# A v5e-16 without a cluster: NAME=... ZONE=... BUCKET=... configs/pods/gcloud.sh
# The slice is there (`gcloud compute tpus tpu-vm create`), and has gcsfuse and clusterkv on each of its hosts.
set -euo pipefail
gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "
mkdir -p ~/results
mountpoint -q ~/results || gcsfuse --implicit-dirs $BUCKET ~/results
code=75
while [ \$code = 75 ]; do
  code=0
  clusterkv evaluate --distributed --mesh data=4,model=4 --suite ruler --lengths 16384 --data hub \
    --methods auto --budgets 1.0,0.5,0.25 --model ~/results/models/llama-3.1-8b \
    --output ~/results/ruler-llama-3.1-8b --cache-folder ~/results/programs || code=\$?
done
exit \$code"
