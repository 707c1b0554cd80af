//! The results of a run, as a table for people and as JSON for programs.

use std::time::Duration;

use comfy_table::Table;
use leasehold_tools::table::plain;
use serde::Serialize;

use crate::library::Library;

/// The results of one library.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub library: &'static str,
    /// Grants of the other library, and of leasehold beside it.
    pub grants: u32,
    pub our_grants: u32,
    pub overlaps: u32,
    pub longest_wait_ms: f64,
    pub control: Control,
    pub their_wakes: Wakes,
    pub our_wakes: Wakes,
    /// How long after the ttl of their killed holder we got the lock.
    pub after_their_ttl_ms: Option<f64>,
    /// How long after the ttl of our killed holder they got the lock.
    pub after_our_ttl_ms: Option<f64>,
    /// The cases that passed.
    pub passed: Vec<&'static str>,
    /// A line for each case that failed.
    pub faults: Vec<String>,
}

/// The results of the run without the other library's lock.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Control {
    pub overlaps: u32,
    pub lost_updates: u32,
}

/// The times from releases to the grants of waiters.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Wakes {
    pub median_ms: f64,
    pub longest_ms: f64,
}

impl Wakes {
    /// `None` without a time.
    pub fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let in_ms = |time: &Duration| time.as_secs_f64() * 1e3;
        Some(Self {
            median_ms: in_ms(times.get(times.len() / 2)?),
            longest_ms: in_ms(times.last()?),
        })
    }
}

/// A runtime whose libraries were left out.
#[derive(Debug, Serialize)]
pub struct LeftOut {
    pub runtime: &'static str,
    pub libraries: Vec<&'static str>,
    pub reason: String,
}

/// The whole run.
#[derive(Debug, Serialize)]
pub struct Results {
    pub outcomes: Vec<Outcome>,
    pub left_out: Vec<LeftOut>,
    pub seconds: f64,
}

impl Outcome {
    pub fn new(library: Library) -> Self {
        Self {
            library: library.name,
            grants: 0,
            our_grants: 0,
            overlaps: 0,
            longest_wait_ms: 0.0,
            control: Control::default(),
            their_wakes: Wakes::default(),
            our_wakes: Wakes::default(),
            after_their_ttl_ms: None,
            after_our_ttl_ms: None,
            passed: Vec::new(),
            faults: Vec::new(),
        }
    }
}

impl Results {
    pub fn faults(&self) -> usize {
        self.outcomes
            .iter()
            .map(|outcome| outcome.faults.len())
            .sum()
    }

    /// The table, and a line for each fault.
    pub fn text(&self) -> String {
        let mut table = Table::new();
        table.set_header([
            "library",
            "their grants",
            "ours",
            "overlaps",
            "longest wait",
            "control finds",
            "they wake after",
            "we wake after",
            "after their ttl",
            "after our ttl",
            "cases",
        ]);
        for outcome in &self.outcomes {
            let cases = outcome.passed.len() + outcome.faults.len();
            table.add_row([
                outcome.library.to_owned(),
                outcome.grants.to_string(),
                outcome.our_grants.to_string(),
                outcome.overlaps.to_string(),
                format!("{:.0} ms", outcome.longest_wait_ms),
                outcome.control.overlaps.to_string(),
                outcome.their_wakes.text(),
                outcome.our_wakes.text(),
                after(outcome.after_their_ttl_ms),
                after(outcome.after_our_ttl_ms),
                format!("{} of {cases}", outcome.passed.len()),
            ]);
        }
        let mut text = plain(table, 1);
        text +=
            "\n\nWake-ups: median / longest, from the order to release until the waiter's report.";
        for outcome in &self.outcomes {
            for fault in &outcome.faults {
                text += &format!("\nFAILED {}: {fault}", outcome.library);
            }
        }
        text += &format!("\nAll took {:.0} s.", self.seconds);
        text
    }
}

impl LeftOut {
    pub fn text(&self) -> String {
        format!(
            "left out: {} ({}): {}",
            self.runtime,
            self.libraries.join(", "),
            self.reason
        )
    }
}

impl Wakes {
    fn text(self) -> String {
        format!("{:.1} / {:.1} ms", self.median_ms, self.longest_ms)
    }
}

fn after(time: Option<f64>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{time:.0} ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_ups_have_a_median_and_a_maximum() {
        let times = [9, 1, 5].map(Duration::from_millis).to_vec();
        let wakes = Wakes::of(times).expect("there are times");
        assert_eq!((wakes.median_ms, wakes.longest_ms), (5.0, 9.0));
        assert!(Wakes::of(Vec::new()).is_none());
    }
}
