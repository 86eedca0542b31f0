#!/usr/bin/env bash
# A v5e-16 without a cluster: NAME=... ZONE=... BUCKET=... configs/pods/gcloud.sh
# The slice is there (`gcloud compute tpus tpu-vm create`), and has clusterkv[tpu,pods,eval] on each of its hosts.
set -euo pipefail
gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "
code=75
while [ \$code = 75 ]; do
  code=0
  clusterkv evaluate --distributed --mesh data=4,model=4 --suite ruler --lengths 16384 --data hub \
    --methods auto --budgets 1.0,0.5,0.25 --model gs://$BUCKET/models/llama-3.1-8b \
    --output gs://$BUCKET/ruler-llama-3.1-8b --cache-folder gs://$BUCKET/programs || code=\$?
done
exit \$code"
