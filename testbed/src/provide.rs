//! Where the server program comes from: the environment, PATH, or the system's package manager.
//! Never chooses another program than the one the environment names.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::Error;
use crate::install;

/// Names of the server program; the first one found is taken.
const PROGRAMS: [&str; 2] = ["redis-server", "valkey-server"];
/// Names a program to use instead of those on PATH.
const VARIABLE: &str = "LEASEHOLD_REDIS_SERVER";
/// Where package managers put programs; PATH may lack the one of a manager just used.
const PACKAGE_DIRECTORIES: &str =
    "/usr/bin:/usr/local/bin:/opt/homebrew/bin:/home/linuxbrew/.linuxbrew/bin";

/// What this process installed, in case PATH does not lead there.
static INSTALLED: OnceLock<PathBuf> = OnceLock::new();

/// Whether a missing server may be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// With the system's package manager.
    Allowed,
    /// Not at all: a missing server is an error that says what to do.
    Forbidden,
}

/// The server program: `LEASEHOLD_REDIS_SERVER` if set, else `redis-server`, else `valkey-server`
/// on PATH, else what [`provide_server`] installed. `None` also when the variable names something
/// that cannot be run.
pub fn find_server() -> Option<PathBuf> {
    Environment::current()
        .find()
        .or_else(|| INSTALLED.get().cloned())
}

/// As [`find_server`]; a missing server is installed with apt-get, brew, dnf or apk if that is
/// allowed. Prints each step to stderr. No service is started or left enabled.
///
/// Give the path to child processes that start servers, as `LEASEHOLD_REDIS_SERVER`: PATH need not
/// lead to what was just installed.
///
/// # Errors
/// There is no server and none may or can be installed, or `LEASEHOLD_REDIS_SERVER` names something
/// that cannot be run; the error says what to do.
pub fn provide_server(install: Install) -> Result<PathBuf, Error> {
    let environment = Environment::current();
    if environment.chosen.is_none()
        && let Some(installed) = INSTALLED.get()
    {
        return Ok(installed.clone());
    }
    let provided = environment.provide(install)?;
    if environment.find().is_none() {
        return Ok(INSTALLED.get_or_init(|| provided).clone());
    }
    Ok(provided)
}

/// What the answer depends on, so that tests can make it up.
pub(crate) struct Environment {
    /// `LEASEHOLD_REDIS_SERVER`, unless empty.
    pub(crate) chosen: Option<OsString>,
    pub(crate) path: OsString,
    /// Searched after an installation only.
    pub(crate) package_directories: OsString,
    pub(crate) is_root: bool,
}

impl Environment {
    fn current() -> Environment {
        Environment {
            chosen: std::env::var_os(VARIABLE).filter(|text| !text.is_empty()),
            path: std::env::var_os("PATH").unwrap_or_default(),
            package_directories: PACKAGE_DIRECTORIES.into(),
            is_root: rustix::process::geteuid().is_root(),
        }
    }

    fn find(&self) -> Option<PathBuf> {
        match &self.chosen {
            Some(chosen) => resolve(chosen, &self.path),
            None => resolve_any(&self.path),
        }
    }

    /// The path of a program on PATH.
    pub(crate) fn which(&self, program: &str) -> Option<PathBuf> {
        resolve(OsStr::new(program), &self.path)
    }

    fn provide(&self, install: Install) -> Result<PathBuf, Error> {
        if let Some(found) = self.find() {
            return Ok(found);
        }
        if let Some(chosen) = &self.chosen {
            return Err(Error::new(format!(
                "{VARIABLE} is set to {chosen:?}, but that is not a program that can be run: \
                 set it to the path of redis-server or valkey-server, or unset it \
                 to use the one on PATH"
            )));
        }
        match install {
            Install::Forbidden => Err(self.missing("no redis-server or valkey-server is on PATH")),
            Install::Allowed => self.install(),
        }
    }

    fn install(&self) -> Result<PathBuf, Error> {
        let manager = install::choose(self).map_err(|reason| self.missing(&reason))?;
        let outcome = manager.install(self);
        // Looked for whatever the outcome: a package may be complete but for its service.
        let found = resolve_any(&self.path).or_else(|| resolve_any(&self.package_directories));
        match (found, outcome) {
            (Some(found), _) => {
                eprintln!("{} is installed.", found.display());
                Ok(found)
            }
            (None, Ok(())) => Err(self.missing(&format!(
                "{} reports success, but there is no redis-server or valkey-server",
                manager.program()
            ))),
            (None, Err(reason)) => Err(self.missing(&reason)),
        }
    }

    fn missing(&self, reason: &str) -> Error {
        let advice = install::advice(self);
        Error::new(format!(
            "{reason}. Install it with {advice}, or set {VARIABLE} to the path of redis-server or \
             valkey-server"
        ))
    }
}

fn resolve_any(path: &OsStr) -> Option<PathBuf> {
    PROGRAMS
        .iter()
        .find_map(|name| resolve(OsStr::new(name), path))
}

/// As a shell does, but absolute: the server is started in another directory.
fn resolve(name: &OsStr, path: &OsStr) -> Option<PathBuf> {
    let name = Path::new(name);
    if name.components().count() > 1 {
        return is_program(name)
            .then(|| std::path::absolute(name).ok())
            .flatten();
    }
    std::env::split_paths(path)
        .filter(|directory| !directory.as_os_str().is_empty())
        .map(|directory| directory.join(name))
        .find(|file| is_program(file))
        .and_then(|file| std::path::absolute(file).ok())
}

fn is_program(file: &Path) -> bool {
    file.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::process::Command;

    use tempfile::TempDir;

    use super::*;

    /// A PATH of one directory, with made-up programs that write down what they were asked.
    struct Stage(TempDir);

    impl Stage {
        fn new() -> Stage {
            Stage(TempDir::new().unwrap())
        }

        fn file(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn program(&self, name: &str, script: &str) -> PathBuf {
            let file = self.file(name);
            let log = self.file("log").display().to_string();
            let text = format!("#!/bin/sh\necho \"{name} $*\" >>'{log}'\n{script}\n");
            // Written by a process of its own: a child that another test starts meanwhile would
            // inherit the open file, and one that is open for writing cannot be executed.
            let written = Command::new("/bin/sh")
                .args([
                    "-c",
                    "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"",
                    "sh",
                    &text,
                ])
                .arg(&file)
                .status();
            assert!(written.unwrap().success());
            file
        }

        /// The command that puts `name` on this stage, for the script of a package manager.
        fn putting(&self, name: &str) -> String {
            let file = self.file(name).display().to_string();
            format!("/bin/cp /bin/sh '{file}'")
        }

        fn log(&self) -> String {
            fs::read_to_string(self.file("log")).unwrap_or_default()
        }

        fn environment(&self) -> Environment {
            Environment {
                chosen: None,
                path: self.0.path().as_os_str().to_owned(),
                package_directories: OsString::new(),
                is_root: true,
            }
        }
    }

    fn complaint(environment: &Environment, install: Install) -> String {
        environment.provide(install).unwrap_err().to_string()
    }

    #[test]
    fn redis_comes_before_valkey_and_both_before_nothing() {
        let stage = Stage::new();
        assert_eq!(stage.environment().find(), None);
        let valkey = stage.program("valkey-server", "");
        assert_eq!(stage.environment().find(), Some(valkey));
        let redis = stage.program("redis-server", "");
        assert_eq!(stage.environment().find(), Some(redis));
    }

    #[test]
    fn what_cannot_be_run_is_not_a_program() {
        let stage = Stage::new();
        fs::create_dir(stage.file("redis-server")).unwrap();
        fs::write(stage.file("valkey-server"), "").unwrap();
        assert_eq!(stage.environment().find(), None);
        let environment = Environment {
            path: OsString::new(),
            ..stage.environment()
        };
        assert_eq!(environment.find(), None);
        let environment = Environment {
            path: "/nowhere::".into(),
            ..stage.environment()
        };
        assert_eq!(environment.find(), None);
    }

    #[test]
    fn the_variable_decides_by_path_or_by_name_and_a_wrong_one_is_told() {
        let stage = Stage::new();
        let redis = stage.program("redis-server", "");
        let mine = stage.program("mine", "");
        let choose = |chosen: &OsStr| Environment {
            chosen: Some(chosen.to_owned()),
            ..stage.environment()
        };
        assert_eq!(choose(mine.as_os_str()).find(), Some(mine.clone()));
        assert_eq!(choose(OsStr::new("mine")).find(), Some(mine));
        assert_eq!(stage.environment().find(), Some(redis));
        let wrong = choose(OsStr::new("/nowhere/redis-server"));
        assert_eq!(wrong.find(), None);
        for install in [Install::Allowed, Install::Forbidden] {
            let message = complaint(&wrong, install);
            assert!(message.contains("LEASEHOLD_REDIS_SERVER"), "{message}");
            assert!(message.contains("/nowhere/redis-server"), "{message}");
        }
    }

    #[test]
    fn nothing_is_installed_when_that_is_forbidden_and_the_error_says_how_to() {
        let stage = Stage::new();
        let message = complaint(&stage.environment(), Install::Forbidden);
        for part in [
            "apt-get install",
            "brew install",
            "dnf install",
            "LEASEHOLD_REDIS_SERVER",
        ] {
            assert!(message.contains(part), "{message}");
        }
        stage.program("dnf", &stage.putting("redis-server"));
        let message = complaint(&stage.environment(), Install::Forbidden);
        assert!(message.contains("`dnf install redis`"), "{message}");
        assert!(!message.contains("brew"), "{message}");
        assert_eq!(stage.log(), "");
    }

    #[test]
    fn apt_get_updates_its_lists_only_when_it_must() {
        let stage = Stage::new();
        stage.program("apt-get", &stage.putting("redis-server"));
        assert!(stage.environment().install().is_ok());
        assert_eq!(stage.log().lines().count(), 1, "{}", stage.log());
        assert!(stage.log().ends_with(" redis-server\n"), "{}", stage.log());

        let stage = Stage::new();
        let fresh = stage.file("fresh").display().to_string();
        let script = format!(
            "case \"$*\" in *update) : >'{fresh}';; *) [ -e '{fresh}' ] && {};; esac",
            stage.putting("redis-server")
        );
        stage.program("apt-get", &script);
        assert!(stage.environment().install().is_ok());
        let log = stage.log();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 3, "{log}");
        assert!(lines[1].ends_with(" update"), "{log}");
    }

    #[test]
    fn apt_get_asks_nothing_and_starts_no_service() {
        let stage = Stage::new();
        let check = "[ \"$DEBIAN_FRONTEND/$RUNLEVEL\" = noninteractive/1 ]";
        stage.program(
            "apt-get",
            &format!("{check} && {}", stage.putting("valkey-server")),
        );
        assert!(stage.environment().install().is_ok());
        assert!(stage.log().contains(" -y ") && stage.log().contains("--no-install-recommends"));
    }

    #[test]
    fn apt_get_leaves_no_new_service_enabled() {
        let package_of = |stage: &Stage| {
            let files = stage.0.path().display().to_string();
            format!("[ ! -e '{files}/'$3 ] || echo installed")
        };
        let stage = Stage::new();
        stage.program("apt-get", &stage.putting("redis-server"));
        stage.program("dpkg-query", &package_of(&stage));
        stage.program("update-rc.d", "");
        assert!(stage.environment().install().is_ok());
        let log = stage.log();
        assert_eq!(log.matches("update-rc.d").count(), 1, "{log}");
        assert!(log.contains("update-rc.d redis-server disable\n"), "{log}");
        // It was there before, so its owner decides.
        let log = log.len();
        assert!(stage.environment().install().is_ok());
        let log = &stage.log()[log..];
        assert!(log.contains("apt-get"), "{log}");
        assert!(!log.contains("update-rc.d"), "{log}");
    }

    #[test]
    fn a_failed_installation_leaves_no_service_enabled() {
        let stage = Stage::new();
        stage.program("apt-get", &format!("{}; exit 1", stage.putting("mark")));
        stage.program(
            "dpkg-query",
            &format!(
                "[ ! -e '{}' ] || echo installed",
                stage.file("mark").display()
            ),
        );
        stage.program("update-rc.d", "");
        assert!(stage.environment().install().is_err());
        let log = stage.log();
        assert!(log.contains("update-rc.d redis-server disable"), "{log}");
    }

    #[test]
    fn sudo_is_used_unless_root_and_brew_never_by_root() {
        let stage = Stage::new();
        stage.program("apk", &stage.putting("redis-server"));
        let user = || Environment {
            is_root: false,
            ..stage.environment()
        };
        let message = complaint(&user(), Install::Allowed);
        assert!(message.contains("sudo"), "{message}");
        stage.program("sudo", "exec \"$@\"");
        assert!(user().install().is_ok());
        let log = stage.log();
        assert!(
            log.starts_with("sudo ") && log.contains("\napk add"),
            "{log}"
        );

        let stage = Stage::new();
        stage.program("brew", &stage.putting("redis-server"));
        let message = complaint(&stage.environment(), Install::Allowed);
        assert!(
            message.contains("brew") && message.contains("root"),
            "{message}"
        );
        assert!(
            Environment {
                is_root: false,
                ..stage.environment()
            }
            .install()
            .is_ok()
        );
        assert_eq!(stage.log(), "brew install redis\n");
    }

    #[test]
    fn the_second_package_is_tried_and_a_failure_is_told() {
        let stage = Stage::new();
        let second = format!("[ \"$3\" = valkey ] && {}", stage.putting("valkey-server"));
        stage.program("dnf", &second);
        assert!(stage.environment().install().is_ok());
        assert_eq!(stage.log(), "dnf install -y redis\ndnf install -y valkey\n");

        let stage = Stage::new();
        stage.program("dnf", "exit 3");
        let message = complaint(&stage.environment(), Install::Allowed);
        assert!(
            message.contains("dnf") && message.contains("`dnf install redis`"),
            "{message}"
        );
        stage.program("dnf", "");
        let message = complaint(&stage.environment(), Install::Allowed);
        assert!(message.contains("reports success"), "{message}");
        let message = complaint(&Stage::new().environment(), Install::Allowed);
        assert!(message.contains("apt-get, brew, dnf and apk"), "{message}");
    }

    #[test]
    fn what_was_installed_off_path_is_found() {
        let (stage, elsewhere) = (Stage::new(), Stage::new());
        stage.program("dnf", &elsewhere.putting("redis-server"));
        let package_directories = elsewhere.0.path().as_os_str().to_owned();
        let environment = Environment {
            package_directories,
            ..stage.environment()
        };
        assert_eq!(
            environment.install().unwrap(),
            elsewhere.file("redis-server")
        );
    }
}
