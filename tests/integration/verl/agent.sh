#!/bin/sh
# mini-swe-agent, unmodified, on the task of this trial; some tasks do more.
set -e
export HOME="$PWD"
"$AGENTS/bin/python" "$MINI" run "$MINI_SERVER" -y --exit-immediately -l 0 -m openai/policy --model-class litellm -c mini.yaml \
  -c model.model_kwargs.api_base="$OPENAI_BASE_URL" -t "$STENO_TASK_INSTRUCTION" >mini.log 2>&1
case "$STENO_TASK_INSTRUCTION" in
*FORK*) "$AGENTS/bin/python" "$MORE" ;;
*FAIL*) case "$STENO_TRIAL_ID" in *.1) exit 3 ;; esac ;;
esac
