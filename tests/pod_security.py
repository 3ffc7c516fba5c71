"""Kubernetes' `restricted` Pod Security Standard, as a check of a pod's spec."""

RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(spec):
    """The controls of the `restricted` profile that a pod's spec breaks, of those that concern keys
    which a spec of ours could have.

    Source: Kubernetes, "Pod Security Standards", the tables Baseline and Restricted, of which
    Restricted takes the first in (kubernetes.io/docs/concepts/security/pod-security-standards).
    """
    pod = spec.get("securityContext", {})
    found = {key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)}
    for volume in spec.get("volumes", ()):
        found |= {f"volume {key}" for key in volume.keys() - {"name"} - RESTRICTED_VOLUMES}
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        own = container.get("securityContext", {})
        both = pod | own
        capabilities = own.get("capabilities", {})
        added = set(capabilities.get("add", ()))
        profile = both.get("seccompProfile", {}).get("type")
        checks = {
            "privileged": own.get("privileged"),
            "capabilities.add": added - {"NET_BIND_SERVICE"},
            "capabilities.drop": "ALL" not in capabilities.get("drop", ()),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": profile not in ("RuntimeDefault", "Localhost"),
        }
        found |= {name for name, broken in checks.items() if broken}
    return found
