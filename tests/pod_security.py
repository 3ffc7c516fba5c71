"""Kubernetes' `restricted` Pod Security Standard, as a check of a pod's spec."""

BASELINE_CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
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
    """The controls of the `restricted` profile that a pod's spec breaks, for pods of Linux.

    Source: Kubernetes, "Pod Security Standards", the tables Baseline and Restricted, of which
    Restricted takes the first in (kubernetes.io/docs/concepts/security/pod-security-standards).
    """
    pod = spec.get("securityContext", {})
    found = {key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)}
    for volume in spec.get("volumes", ()):
        found |= {f"volume {key}" for key in volume.keys() - {"name"} - RESTRICTED_VOLUMES}
    if pod.get("sysctls"):
        found.add("sysctls")
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        own = container.get("securityContext", {})
        both = pod | own
        capabilities = own.get("capabilities", {})
        added = set(capabilities.get("add", ()))
        profile = both.get("seccompProfile", {}).get("type")
        checks = {
            "privileged": own.get("privileged"),
            "capabilities.add": added - {"NET_BIND_SERVICE"} or added - BASELINE_CAPABILITIES,
            "capabilities.drop": "ALL" not in capabilities.get("drop", ()),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": profile not in ("RuntimeDefault", "Localhost"),
            "appArmorProfile": both.get("appArmorProfile", {}).get("type", "RuntimeDefault")
            == "Unconfined",
            "seLinuxOptions": {"user", "role"} & {*both.get("seLinuxOptions", {})},
            "procMount": own.get("procMount", "Default") != "Default",
            "hostPort": any(port.get("hostPort") for port in container.get("ports", ())),
            "windowsOptions": both.get("windowsOptions", {}).get("hostProcess"),
        }
        found |= {name for name, broken in checks.items() if broken}
    return found
