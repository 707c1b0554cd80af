//! Durations on the command line, and a clock that also runs while the machine sleeps.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The clock for deadlines. On Linux, it also runs while the machine sleeps, like a ttl in Redis.
pub const CLOCK: ClockId = if cfg!(target_os = "linux") {
    ClockId::Boottime
} else {
    ClockId::Monotonic
};

/// The time of [`CLOCK`].
pub fn now() -> Duration {
    let now = clock_gettime(CLOCK);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Reads a duration: a number of seconds, which may have a fraction, or a number with one of the units `ms`, `s`, `m`,
/// `h` and `d`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds = match &text[digits.len()..] {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3_600.0,
        "d" => 86_400.0,
        unit => return Err(format!("{unit:?} is no unit: use ms, s, m, h or d")),
    };
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    let number = digits.parse::<f64>().ok().filter(|_| is_number);
    let number = number.ok_or("a duration has the form 1.5, 250ms, 30s, 15m, 2h or 1d")?;
    Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, ms) in [
            ("0", 0),
            ("1.5", 1_500),
            (".25", 250),
            ("250ms", 250),
            ("30s", 30_000),
            ("1.5m", 90_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "", "s", "-1", "+1", "1 s", "1y", "1e400", "inf", "NaN", "0x1", "1.2.3",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
