//! The results of the counter's two runs, as sentences and a table. Measures nothing.

use std::time::Duration;

use anyhow::ensure;
use comfy_table::Table;
use leasehold_load::Waits;
use leasehold_tools::table::framed;

use crate::messages::Tally;

/// One run of all processes, with the lock or without.
pub struct Run {
    /// One per process.
    pub tallies: Vec<Tally>,
    /// The counter at the end.
    pub counted: u64,
}

impl Run {
    pub fn made(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.increments).sum()
    }

    pub fn lost(&self) -> u64 {
        self.made().saturating_sub(self.counted)
    }

    pub fn verdict(&self) -> String {
        let (made, counted) = (self.made(), self.counted);
        let lost = match self.lost() {
            0 => "none lost".to_owned(),
            lost => format!("{lost} updates lost"),
        };
        format!("{made} increments, the counter is {counted}: {lost}.")
    }

    /// The rate over the time of the slowest process, including its last waits.
    fn per_second(&self, increments: u64) -> String {
        let took = self.tallies.iter().map(|tally| tally.took).max();
        let took = took.unwrap_or_default().as_secs_f64();
        format!("{:.0}", increments as f64 / took)
    }
}

pub fn table(without: &Run, with: &Run) -> anyhow::Result<String> {
    let mut table = Table::new();
    table.set_header([
        "",
        "increments",
        "per second",
        "lost",
        "wait p50",
        "wait p99",
        "longest",
    ]);
    table.add_row(row(
        "without a lock",
        without.made(),
        without,
        None,
        Some(without.lost()),
    ));
    let mut all = Waits::new()?;
    let mut rows = Vec::new();
    for (n, tally) in with.tallies.iter().enumerate() {
        let mut waits = Waits::new()?;
        waits.add(&tally.waits)?;
        ensure!(
            waits.times() == tally.increments,
            "a grant's wait was not recorded"
        );
        all.merge(&waits)?;
        rows.push(row(
            &format!("  process {}", n + 1),
            tally.increments,
            with,
            Some(&waits),
            None,
        ));
    }
    table.add_row(row(
        "with the lock",
        with.made(),
        with,
        Some(&all),
        Some(with.lost()),
    ));
    table.add_rows(rows);
    Ok(framed(table, 1))
}

fn row(
    name: &str,
    increments: u64,
    run: &Run,
    waits: Option<&Waits>,
    lost: Option<u64>,
) -> [String; 7] {
    let waited = |quantile| {
        let wait = waits.and_then(|waits| waits.quantile(quantile));
        wait.map_or_else(String::new, milliseconds)
    };
    [
        name.to_owned(),
        increments.to_string(),
        run.per_second(increments),
        lost.map_or_else(String::new, |lost| lost.to_string()),
        waited(0.5),
        waited(0.99),
        waited(1.0),
    ]
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
