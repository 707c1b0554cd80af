//! Writes results to standard output: text for people, or JSON for programs.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::process;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::exit::SYSTEM;

/// The form of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Text,
    Json,
}

/// Writes a line. Ends the program if the line cannot be written: with success if the reader has closed the pipe, as
/// `head` does, and otherwise with an error, such as that of a full disk.
pub fn line(text: impl Display) {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => process::exit(0),
        Err(error) => {
            message(format_args!("standard output: {error}"));
            process::exit(SYSTEM.into())
        }
    }
}

/// Writes a message to standard error. The program continues if it cannot write: a closed terminal or a full disk must
/// not end the supervision of a command, or change the exit code.
pub fn message(text: impl Display) {
    let text = format!("leasehold: {text}\n");
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Writes a value as one line of JSON.
pub fn json(value: &impl Serialize) {
    let text = serde_json::to_string(value);
    line(text.expect("each field has a name"));
}

/// Milliseconds, for JSON.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The time since 1970 in ms, for JSON.
pub fn unix_millis(time: SystemTime) -> u64 {
    millis(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// A duration for people, in its greatest unit and the next smaller one.
pub fn short(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{:.1}s", duration.as_secs_f64()),
        60..3_600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units() {
        for (ms, expected) in [
            (0, "0ms"),
            (999, "999ms"),
            (12_345, "12.3s"),
            (61_000, "1m 01s"),
            (3_661_000, "1h 01m"),
            (90_000_000, "1d 01h"),
        ] {
            assert_eq!(short(Duration::from_millis(ms)), expected);
        }
    }
}
