"""What rollouts with `--environment kubernetes` ask of a cluster: verbs and resources. Tests see these asked, and no
other; the chart's Role allows these, and no other."""

NEEDED = {
    ("create", "pods"),
    ("get", "pods"),
    ("list", "pods"),
    ("watch", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/exec"),
    ("create", "secrets"),
    ("create", "leases"),
    ("update", "leases"),
    ("list", "leases"),
    ("delete", "leases"),
}
