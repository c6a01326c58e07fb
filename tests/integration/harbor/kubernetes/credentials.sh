#!/bin/sh
# A program that a kubeconfig names for its user: it gives another token each time, and none while $GIVEN/away is there. What asks it is no
# terminal, and has nothing to say on stdin.
{ said=$(cat) && [ -z "$said" ]; } || { echo "stdin is not at its end: $said" >&2; exit 3; }
if [ -e "$GIVEN/away" ]; then
  : >"$GIVEN/refused"
  echo "the account can't be reached" >&2
  exit 1
fi
made=$(mktemp "$GIVEN/token-XXXXXXXXXX") || exit 4
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "%s-%s"}}\n' "$PREFIX" "${made##*/}"
