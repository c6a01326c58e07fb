#!/bin/sh
# One trial: mini-swe-agent on the task's instruction, in the trial's working folder. Its own files go beside that folder.
HOME=$(dirname "$STENO_WORKDIR")/home
mkdir -p "$HOME"
export HOME MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
exec mini -y --exit-immediately -l 0 -m openai/policy --model-class litellm -c mini.yaml \
  -c "model.model_kwargs.api_base=$OPENAI_BASE_URL" -o "$HOME/trajectory.json" -t "$STENO_TASK_INSTRUCTION"
