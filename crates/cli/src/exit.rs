//! The exit codes, and the error that ends the program with one of them. docs/cli.md lists the codes.

use std::fmt::Display;
use std::process::ExitCode;

use leasehold::{Error, ErrorKind};

use crate::output::message;

/// The lock has another holder, unless `-E` names another code.
pub const CONFLICT: u8 = 1;
/// Wrong arguments or settings (`EX_USAGE`).
pub const USAGE: u8 = 64;
/// Redis, or a majority of a quorum, cannot be reached (`EX_UNAVAILABLE`).
pub const AWAY: u8 = 69;
/// The operating system refuses something (`EX_OSERR`).
pub const SYSTEM: u8 = 71;
/// The lock was lost, or could not be renewed in time (`EX_TEMPFAIL`).
pub const LOST: u8 = 75;
/// Unexpected data in Redis, such as a value of another program under the key (`EX_PROTOCOL`).
pub const PROTOCOL: u8 = 76;
/// Redis refuses the login or a command (`EX_NOPERM`).
pub const DENIED: u8 = 77;
/// The command cannot be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command does not exist.
pub const NOT_FOUND: u8 = 127;
/// The first code of a command that a signal has ended.
pub const SIGNALED: u8 = 128;

/// Ends the program with a message and an exit code.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    pub message: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Display) -> Self {
        Self {
            code,
            message: message.to_string(),
        }
    }

    pub fn usage(message: impl Display) -> Self {
        Self::new(USAGE, message)
    }

    /// Prints the message, and returns the exit code.
    pub fn report(self) -> ExitCode {
        message(&self.message);
        ExitCode::from(self.code)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::NoQuorum | ErrorKind::Tls => {
                AWAY
            }
            ErrorKind::InvalidConfig | ErrorKind::InvalidKey | ErrorKind::Unsupported => USAGE,
            ErrorKind::LeaseLost => LOST,
            ErrorKind::Denied => DENIED,
            ErrorKind::Protocol | ErrorKind::TooLarge => PROTOCOL,
            _ => SYSTEM,
        };
        Self::new(code, with_source(&error))
    }
}

/// The text of an error, with that of its source.
fn with_source(error: &Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(SYSTEM, error)
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        std::io::Error::from(error).into()
    }
}
