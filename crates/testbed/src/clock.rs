//! Gives test servers and other programs clocks of their own, by libfaketime. The clock of the machine stays as it is.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::provide::install_faketime;
use crate::{Error, Install, Reply, Server};

/// The parents of the library's folder. On Debian, it is a folder of `/usr/lib`.
const PARENTS: [&str; 4] = [
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/lib64",
];
/// The library for programs with several threads.
const LIBRARY: &str = "faketime/libfaketimeMT.so.1";
/// The file in the directory of a server or program that the library reads.
const FILE: &str = "clock";
/// The offset that a trial sets: much longer than the trial takes.
const TRIAL: Duration = Duration::from_secs(3600);

/// The library that gives a server a clock of its own: see
/// [`ServerBuilder::own_clock`](crate::ServerBuilder::own_clock). [`command`](Self::command) does the same for other
/// programs.
#[derive(Clone, Debug)]
pub struct OwnClock {
    library: PathBuf,
}

impl OwnClock {
    /// The installed library; `None` if it is not installed, or does not work with the server program.
    pub fn find() -> Option<Self> {
        let clock = Self {
            library: installed()?,
        };
        clock.works().then_some(clock)
    }

    /// Finds the library as [`find`](Self::find) does. Installs a missing one with apt-get or dnf, if that is allowed.
    /// Prints each step, and the reason for a failed one, to stderr.
    pub fn provide(install: Install) -> Option<Self> {
        if installed().is_none()
            && install == Install::Allowed
            && let Err(reason) = install_faketime()
        {
            eprintln!("faketime is not installed: {reason}");
        }
        Self::find()
    }

    /// A command that runs `program` with the clock of `directory`, which [`set`](Self::set) sets. Call `set` before
    /// the command starts.
    pub fn command(&self, program: &Path, directory: &Path) -> Command {
        let mut command = Command::new("env");
        command.args(self.environment(directory)).arg(program);
        command
    }

    /// Sets the clock of `directory`: how far it is ahead of the machine's clock, in µs. Running programs see the
    /// change.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set(directory: &Path, offset: i64) -> Result<(), Error> {
        write(directory, offset)
    }

    fn works(&self) -> bool {
        let Ok(server) = Server::builder().own_clock(self).start() else {
            return false;
        };
        let offset = i64::try_from(TRIAL.as_micros()).expect("an hour");
        server.set_clock_offset(offset).is_ok() && reads_at_least(&server, TRIAL / 2)
    }

    /// The arguments of `env` before the program: they make the program use the clock of `directory`.
    pub(crate) fn environment(&self, directory: &Path) -> [OsString; 5] {
        let assign = |name: &str, value: &Path| {
            let mut text = OsString::from(name);
            text.push("=");
            text.push(value);
            text
        };
        // With the allocator of the C library: jemalloc reads the clock before libfaketime is ready.
        let mut preload = assign("LD_PRELOAD", &self.library);
        preload.push(":libc.so.6");
        [
            preload,
            assign("FAKETIME_TIMESTAMP_FILE", &directory.join(FILE)),
            // The library reads the file whenever the server reads its clock.
            "FAKETIME_NO_CACHE=1".into(),
            "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
            // The times of files stay real.
            "NO_FAKE_STAT=1".into(),
        ]
    }
}

/// Whether the clock of the server is ahead of the machine's clock by `least`.
fn reads_at_least(server: &Server, least: Duration) -> bool {
    let Ok(Reply::Array(time)) = server.command(&["TIME"]) else {
        return false;
    };
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = time.first().and_then(Reply::as_int);
    let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok());
    seconds.is_some_and(|seconds| Duration::from_secs(seconds) >= now + least)
}

/// Removes the files that the library makes for child processes of the server. A killed server would leave them behind.
pub(crate) fn remove_shared(pid: u32) {
    for name in [
        format!("faketime_shm_{pid}"),
        format!("sem.faketime_sem_{pid}"),
    ] {
        // Another version of the library makes other files, or none.
        let _ = fs::remove_file(Path::new("/dev/shm").join(name));
    }
}

/// Writes the file that the library reads: how far the clock is ahead of the machine's clock, in µs.
pub(crate) fn write(directory: &Path, offset: i64) -> Result<(), Error> {
    let sign = if offset < 0 { '-' } else { '+' };
    let micros = offset.unsigned_abs();
    let text = format!("{sign}{}.{:06}\n", micros / 1_000_000, micros % 1_000_000);
    // A rename, so that the server never reads half of the file.
    let new = directory.join(format!("{FILE}.new"));
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, directory.join(FILE)))
        .map_err(|error| Error::io("the offset of the server's clock cannot be written", error))
}

fn installed() -> Option<PathBuf> {
    let mut parents = PARENTS.iter().map(Path::new);
    parents.find_map(library_in)
}

fn library_in(parent: &Path) -> Option<PathBuf> {
    let folders = fs::read_dir(parent)
        .ok()?
        .flatten()
        .map(|entry| entry.path());
    let mut folders = [parent.to_owned()].into_iter().chain(folders);
    folders.find_map(|folder| Some(folder.join(LIBRARY)).filter(|library| library.is_file()))
}
