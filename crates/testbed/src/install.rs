//! The package managers that can install a server, and the library that gives servers clocks of their own. They leave
//! only the package behind: no service is started or enabled.

use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use crate::provide::Environment;

/// Installs Debian's package without its service. The package would start a service on port 6379, and enable it for the
/// next boot. RUNLEVEL=1 keeps init scripts from starting the service, and a mask under /run keeps systemd from it.
/// However the script ends, it removes the mask, and disables the services of packages that were not installed before.
const APT_GET: &str = r#"
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
services="redis-server.service valkey-server.service"
is_installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1")" = installed ]
}
install() {
    apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$1"
}
finish() {
    [ ! -d /run/systemd/system ] || systemctl --runtime unmask $services
    for package in $new; do
        if is_installed $package && update-rc.d $package disable; then
            echo "the service $package is not started and not enabled: neither is needed here"
        fi
    done
}
new=
for package in redis-server valkey-server; do
    is_installed $package || new="$new $package"
done
trap finish EXIT
trap 'exit 1' HUP INT TERM
[ ! -d /run/systemd/system ] || systemctl --runtime mask $services
install redis-server ||
    { apt-get update && install redis-server; } ||
    install valkey-server
"#;
/// Installs Debian's package of the library.
const APT_GET_FAKETIME: &str = r#"
export DEBIAN_FRONTEND=noninteractive
install() {
    apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends faketime
}
install || { apt-get update && install; }
"#;
const BREW: &str = "brew install redis || brew install valkey";
const DNF: &str = "dnf install -y redis || dnf install -y valkey";
const DNF_FAKETIME: &str = "dnf install -y libfaketime";
const APK: &str = "apk add --no-cache redis || apk add --no-cache valkey";

/// A package manager.
pub(crate) struct Manager {
    program: &'static str,
    /// Installs the server.
    script: &'static str,
    /// Installs faketime, which works on Linux with glibc only.
    faketime_script: Option<&'static str>,
    /// The command for a person to type.
    by_hand: &'static str,
    /// Whether the manager must run as root. If not, it refuses to run as root.
    as_root: bool,
}

const MANAGERS: [Manager; 4] = [
    Manager {
        program: "apt-get",
        script: APT_GET,
        faketime_script: Some(APT_GET_FAKETIME),
        by_hand: "apt-get install redis-server",
        as_root: true,
    },
    Manager {
        program: "brew",
        script: BREW,
        faketime_script: None,
        by_hand: "brew install redis",
        as_root: false,
    },
    Manager {
        program: "dnf",
        script: DNF,
        faketime_script: Some(DNF_FAKETIME),
        by_hand: "dnf install redis",
        as_root: true,
    },
    Manager {
        program: "apk",
        script: APK,
        faketime_script: None,
        by_hand: "apk add redis",
        as_root: true,
    },
];

/// The first package manager that can be used, or the reason why there is none.
pub(crate) fn choose(environment: &Environment) -> Result<&'static Manager, String> {
    let mut reason = "none of the package managers apt-get, brew, dnf and apk is on PATH";
    for manager in &MANAGERS {
        if environment.which(manager.program).is_none() {
            continue;
        }
        match (manager.as_root, environment.is_root) {
            (true, false) if environment.which("sudo").is_none() => {
                reason = "packages are installed by root here, and there is no sudo";
            }
            (false, true) => reason = "brew refuses to be run by root",
            _ => return Ok(manager),
        }
    }
    Err(reason.to_owned())
}

/// The command line for the user to type, or several if the right one is not known.
pub(crate) fn advice(environment: &Environment) -> String {
    let line = |manager: &Manager| {
        let sudo = if manager.as_root && !environment.is_root {
            "sudo "
        } else {
            ""
        };
        format!("`{sudo}{}`", manager.by_hand)
    };
    let present = MANAGERS
        .iter()
        .find(|manager| environment.which(manager.program).is_some());
    match present {
        Some(manager) => line(manager),
        None => MANAGERS.iter().map(line).collect::<Vec<_>>().join(" or "),
    }
}

impl Manager {
    pub(crate) fn program(&self) -> &'static str {
        self.program
    }

    /// Installs the server, and shows the output.
    pub(crate) fn install(&self, environment: &Environment) -> Result<(), String> {
        self.run("redis-server", self.script, environment)
    }

    /// Installs faketime, and shows the output.
    pub(crate) fn install_faketime(&self, environment: &Environment) -> Result<(), String> {
        match self.faketime_script {
            Some(script) => self.run("faketime", script, environment),
            None => Err(format!("{} has no package that works", self.program)),
        }
    }

    fn run(&self, package: &str, script: &str, environment: &Environment) -> Result<(), String> {
        let with_sudo = self.as_root && !environment.is_root;
        let by = if with_sudo { "sudo and " } else { "" };
        eprintln!(
            "{package} is not installed: installing it with {by}{} ...",
            self.program
        );
        let mut command = match environment.which("sudo") {
            Some(sudo) if with_sudo => {
                let mut command = Command::new(sudo);
                command.arg("/bin/sh");
                command
            }
            _ => Command::new("/bin/sh"),
        };
        // -x: every command is shown before it is run.
        command
            .args(["-xc", script])
            .env("PATH", &environment.path)
            .stdin(Stdio::null());
        if let Ok(stderr) = std::io::stderr().as_fd().try_clone_to_owned() {
            // Standard output belongs to the program that needs the server.
            command.stdout(stderr);
        }
        match command.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!(
                "{} could not install {package} ({status})",
                self.program
            )),
            Err(error) => Err(format!("{} could not be started: {error}", self.program)),
        }
    }
}
