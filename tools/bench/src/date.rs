//! Today's date (UTC), for the names of folders.

use std::time::{SystemTime, UNIX_EPOCH};

const SECONDS_PER_DAY: u64 = 86_400;

pub fn today() -> anyhow::Result<String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(date(since.as_secs() / SECONDS_PER_DAY))
}

/// The date `days` days after 1970-01-01.
fn date(mut days: u64) -> String {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_right_around_leap_days() {
        let days = [0, 364, 365, 11_016, 11_017, 20_512, 20_513];
        let dates = [
            "1970-01-01",
            "1970-12-31",
            "1971-01-01",
            "2000-02-29",
            "2000-03-01",
            "2026-02-28",
            "2026-03-01",
        ];
        assert_eq!(days.map(date), dates);
    }
}
