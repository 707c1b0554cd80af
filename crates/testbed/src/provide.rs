//! Finds or installs the server program: from the environment, PATH, or the system's package manager. If the
//! environment names a program, no other program is used.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::Error;
use crate::install;

/// Names of the server program; the first one found is taken.
const PROGRAMS: [&str; 2] = ["redis-server", "valkey-server"];
/// The variable that names a program to use instead of those on PATH.
const VARIABLE: &str = "LEASEHOLD_REDIS_SERVER";
/// The directories of package managers. PATH may lack the directory of a manager that was just used.
const PACKAGE_DIRECTORIES: &str =
    "/usr/bin:/usr/local/bin:/opt/homebrew/bin:/home/linuxbrew/.linuxbrew/bin";

/// The program that this process installed, which may not be on PATH.
static INSTALLED: OnceLock<PathBuf> = OnceLock::new();

/// Whether a missing server may be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// With the system's package manager.
    Allowed,
    /// Never: a missing server is an error that contains the next step.
    Forbidden,
}

/// The server program: `LEASEHOLD_REDIS_SERVER` if set, else `redis-server`, else `valkey-server` on PATH, else the
/// program that [`provide_server`] installed. Also `None` if the variable names a program that cannot be run.
pub fn find_server() -> Option<PathBuf> {
    Environment::current()
        .find()
        .or_else(|| INSTALLED.get().cloned())
}

/// Finds the server program as [`find_server`] does. Installs a missing one with apt-get, brew, dnf or apk, if that is
/// allowed. Prints each step to stderr. No service is started or left enabled.
///
/// For child processes that start servers, set `LEASEHOLD_REDIS_SERVER` to the returned path: the new program may not
/// be on PATH.
///
/// # Errors
/// There is no server and none may or can be installed, or `LEASEHOLD_REDIS_SERVER` names something that cannot be run.
/// The error contains the next step.
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

/// Installs faketime with apt-get or dnf. Prints each step to stderr.
pub(crate) fn install_faketime() -> Result<(), String> {
    Environment::current().install_faketime()
}

/// The inputs of the search; tests replace them.
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
                "{VARIABLE} is set to {chosen:?}, which is not a program that can be run: set it to the path \
                of redis-server or valkey-server, or unset it to use the one on PATH"
            )));
        }
        match install {
            Install::Forbidden => Err(self.missing("no redis-server or valkey-server is on PATH")),
            Install::Allowed => self.install(),
        }
    }

    fn install(&self) -> Result<PathBuf, Error> {
        let manager = install::choose(self).map_err(|reason| {
            self.missing(&format!("redis-server cannot be installed: {reason}"))
        })?;
        let outcome = manager.install(self);
        // Search even if the installation failed: the package may be complete except for its service.
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

    fn install_faketime(&self) -> Result<(), String> {
        install::choose(self)?.install_faketime(self)
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

/// Finds a program as a shell does. The path is absolute, since the server is started in another directory.
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

    /// A PATH of one directory, with fake programs that log their arguments.
    struct FakePath(TempDir);

    impl FakePath {
        fn new() -> FakePath {
            FakePath(TempDir::new().unwrap())
        }

        fn file(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn program(&self, name: &str, script: &str) -> PathBuf {
            let file = self.file(name);
            let log = self.file("log").display().to_string();
            let text = format!("#!/bin/sh\necho \"{name} $*\" >>'{log}'\n{script}\n");
            // Another process writes the file. If this process wrote it, a child that another test starts at that
            // moment would inherit the open file. The system executes no file that is open for writing.
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

        /// The command with which the fake script of a package manager installs the program `name` into this PATH.
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
        let path = FakePath::new();
        assert_eq!(path.environment().find(), None);
        let valkey = path.program("valkey-server", "");
        assert_eq!(path.environment().find(), Some(valkey));
        let redis = path.program("redis-server", "");
        assert_eq!(path.environment().find(), Some(redis));
    }

    #[test]
    fn files_that_cannot_run_are_skipped() {
        let path = FakePath::new();
        fs::create_dir(path.file("redis-server")).unwrap();
        fs::write(path.file("valkey-server"), "").unwrap();
        assert_eq!(path.environment().find(), None);
        let environment = Environment {
            path: OsString::new(),
            ..path.environment()
        };
        assert_eq!(environment.find(), None);
        let environment = Environment {
            path: "/nowhere::".into(),
            ..path.environment()
        };
        assert_eq!(environment.find(), None);
    }

    #[test]
    fn the_variable_names_a_path_or_program() {
        let path = FakePath::new();
        let redis = path.program("redis-server", "");
        let mine = path.program("mine", "");
        let choose = |chosen: &OsStr| Environment {
            chosen: Some(chosen.to_owned()),
            ..path.environment()
        };
        assert_eq!(choose(mine.as_os_str()).find(), Some(mine.clone()));
        assert_eq!(choose(OsStr::new("mine")).find(), Some(mine));
        assert_eq!(path.environment().find(), Some(redis));
        let wrong = choose(OsStr::new("/nowhere/redis-server"));
        assert_eq!(wrong.find(), None);
        for install in [Install::Allowed, Install::Forbidden] {
            let message = complaint(&wrong, install);
            assert!(message.contains("LEASEHOLD_REDIS_SERVER"), "{message}");
            assert!(message.contains("/nowhere/redis-server"), "{message}");
        }
    }

    #[test]
    fn forbidden_installation_fails_with_the_command_to_run() {
        let path = FakePath::new();
        let message = complaint(&path.environment(), Install::Forbidden);
        for part in [
            "apt-get install",
            "brew install",
            "dnf install",
            "LEASEHOLD_REDIS_SERVER",
        ] {
            assert!(message.contains(part), "{message}");
        }
        path.program("dnf", &path.putting("redis-server"));
        let message = complaint(&path.environment(), Install::Forbidden);
        assert!(message.contains("`dnf install redis`"), "{message}");
        assert!(!message.contains("brew"), "{message}");
        assert_eq!(path.log(), "");
    }

    #[test]
    fn apt_get_updates_its_lists_only_when_it_must() {
        let path = FakePath::new();
        path.program("apt-get", &path.putting("redis-server"));
        assert!(path.environment().install().is_ok());
        assert_eq!(path.log().lines().count(), 1, "{}", path.log());
        assert!(path.log().ends_with(" redis-server\n"), "{}", path.log());

        let path = FakePath::new();
        let fresh = path.file("fresh").display().to_string();
        let script = format!(
            "case \"$*\" in *update) : >'{fresh}';; *) [ -e '{fresh}' ] && {};; esac",
            path.putting("redis-server")
        );
        path.program("apt-get", &script);
        assert!(path.environment().install().is_ok());
        let log = path.log();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 3, "{log}");
        assert!(lines[1].ends_with(" update"), "{log}");
    }

    #[test]
    fn apt_get_asks_nothing_and_starts_no_service() {
        let path = FakePath::new();
        let check = "[ \"$DEBIAN_FRONTEND/$RUNLEVEL\" = noninteractive/1 ]";
        path.program(
            "apt-get",
            &format!("{check} && {}", path.putting("valkey-server")),
        );
        assert!(path.environment().install().is_ok());
        assert!(path.log().contains(" -y ") && path.log().contains("--no-install-recommends"));
    }

    #[test]
    fn faketime_is_installed_where_it_works() {
        let path = FakePath::new();
        path.program("brew", "");
        let user = Environment {
            is_root: false,
            ..path.environment()
        };
        let reason = user.install_faketime().unwrap_err();
        assert!(reason.contains("brew"), "{reason}");
        // apt-get knows the package once its lists are new.
        let fresh = path.file("fresh").display().to_string();
        let script = format!("case \"$*\" in *update) : >'{fresh}';; *) [ -e '{fresh}' ];; esac");
        path.program("apt-get", &script);
        path.environment().install_faketime().unwrap();
        let log = path.log();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 3, "{log}");
        assert!(lines[2].ends_with(" faketime"), "{log}");
        let reason = FakePath::new().environment().install_faketime();
        assert!(reason.unwrap_err().contains("on PATH"));
    }

    #[test]
    fn apt_get_leaves_no_new_service_enabled() {
        let package_of = |path: &FakePath| {
            let files = path.0.path().display().to_string();
            format!("[ ! -e '{files}/'$3 ] || echo installed")
        };
        let path = FakePath::new();
        path.program("apt-get", &path.putting("redis-server"));
        path.program("dpkg-query", &package_of(&path));
        path.program("update-rc.d", "");
        assert!(path.environment().install().is_ok());
        let log = path.log();
        assert_eq!(log.matches("update-rc.d").count(), 1, "{log}");
        assert!(log.contains("update-rc.d redis-server disable\n"), "{log}");
        // The package was installed before, so its owner decides whether the service runs.
        let log = log.len();
        assert!(path.environment().install().is_ok());
        let log = &path.log()[log..];
        assert!(log.contains("apt-get"), "{log}");
        assert!(!log.contains("update-rc.d"), "{log}");
    }

    #[test]
    fn a_failed_installation_leaves_no_service_enabled() {
        let path = FakePath::new();
        path.program("apt-get", &format!("{}; exit 1", path.putting("mark")));
        path.program(
            "dpkg-query",
            &format!(
                "[ ! -e '{}' ] || echo installed",
                path.file("mark").display()
            ),
        );
        path.program("update-rc.d", "");
        assert!(path.environment().install().is_err());
        let log = path.log();
        assert!(log.contains("update-rc.d redis-server disable"), "{log}");
    }

    #[test]
    fn root_needs_no_sudo_and_never_runs_brew() {
        let path = FakePath::new();
        path.program("apk", &path.putting("redis-server"));
        let user = || Environment {
            is_root: false,
            ..path.environment()
        };
        let message = complaint(&user(), Install::Allowed);
        assert!(message.contains("sudo"), "{message}");
        path.program("sudo", "exec \"$@\"");
        assert!(user().install().is_ok());
        let log = path.log();
        assert!(
            log.starts_with("sudo ") && log.contains("\napk add"),
            "{log}"
        );

        let path = FakePath::new();
        path.program("brew", &path.putting("redis-server"));
        let message = complaint(&path.environment(), Install::Allowed);
        assert!(
            message.contains("brew") && message.contains("root"),
            "{message}"
        );
        assert!(
            Environment {
                is_root: false,
                ..path.environment()
            }
            .install()
            .is_ok()
        );
        assert_eq!(path.log(), "brew install redis\n");
    }

    #[test]
    fn a_second_package_is_tried_and_failures_reported() {
        let path = FakePath::new();
        let second = format!("[ \"$3\" = valkey ] && {}", path.putting("valkey-server"));
        path.program("dnf", &second);
        assert!(path.environment().install().is_ok());
        assert_eq!(path.log(), "dnf install -y redis\ndnf install -y valkey\n");

        let path = FakePath::new();
        path.program("dnf", "exit 3");
        let message = complaint(&path.environment(), Install::Allowed);
        assert!(
            message.contains("dnf") && message.contains("`dnf install redis`"),
            "{message}"
        );
        path.program("dnf", "");
        let message = complaint(&path.environment(), Install::Allowed);
        assert!(message.contains("reports success"), "{message}");
        let message = complaint(&FakePath::new().environment(), Install::Allowed);
        assert!(message.contains("apt-get, brew, dnf and apk"), "{message}");
    }

    #[test]
    fn programs_installed_outside_path_are_found() {
        let (path, elsewhere) = (FakePath::new(), FakePath::new());
        path.program("dnf", &elsewhere.putting("redis-server"));
        let package_directories = elsewhere.0.path().as_os_str().to_owned();
        let environment = Environment {
            package_directories,
            ..path.environment()
        };
        assert_eq!(
            environment.install().unwrap(),
            elsewhere.file("redis-server")
        );
    }
}
