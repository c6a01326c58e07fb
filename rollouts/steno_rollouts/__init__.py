"""Who runs the agents: groups are registered, a command is run once per trial, rewards are found and posted.

`harness.Rollouts` is the whole of it in process; `steno rollout` is its command line. Nothing here knows tokens: what the
agents' model calls leave behind is the proxy's business. docs/rollouts.md says what a user needs to know.
"""
