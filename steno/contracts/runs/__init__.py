"""What launchers and trainers of one run agree on: claims of trials, leases of groups, which calls are trained, steps.

Bodies of `/runs`, `/groups/{group_id}/claims` and `/leases`.
"""
