//! The results of one case: spreads, figures, limits and whether they were kept.

use std::fmt;

use comfy_table::Table;
use hdrhistogram::Histogram;

use crate::support;

pub struct Report {
    spreads: Table,
    figures: Table,
    notes: Vec<String>,
    /// Limits of speed that were missed.
    missed: Vec<String>,
    /// Results that must never happen, however slow the machine.
    wrong: Vec<String>,
}

impl Report {
    pub fn new() -> Self {
        Self {
            spreads: support::table(["ms", "p50", "p99", "max", "count"]),
            figures: support::table(["", "measured", "limit", ""]),
            notes: Vec::new(),
            missed: Vec::new(),
            wrong: Vec::new(),
        }
    }

    pub fn spread(&mut self, what: &str, of: &Histogram<u64>) {
        self.spreads.add_row(support::spread(what, of));
    }

    /// How late the machine wakes threads, to compare the other figures with.
    pub fn sleep(&mut self, late: &Histogram<u64>) {
        self.spread("a sleep on this machine meanwhile, too long by", late);
    }

    /// A figure without a limit.
    pub fn figure(&mut self, what: &str, measured: f64) {
        self.row(what, written(measured), String::new(), "");
    }

    pub fn at_least(&mut self, what: &str, measured: f64, limit: f64) {
        self.judge(what, measured, ("at least", limit), measured >= limit);
    }

    pub fn at_most(&mut self, what: &str, measured: f64, limit: f64) {
        self.judge(what, measured, ("at most", limit), measured <= limit);
    }

    /// Adds a count that must be zero.
    pub fn never(&mut self, what: &str, count: usize) {
        let verdict = if count == 0 { "ok" } else { "WRONG" };
        self.row(what, count.to_string(), "none".to_owned(), verdict);
        if count > 0 {
            self.wrong.push(format!("{what}: {count}"));
        }
    }

    /// A line below the tables.
    pub fn note(&mut self, line: String) {
        self.notes.push(line);
    }

    /// The failures as text. Missed limits of speed are failures only if `limits_count`.
    pub fn failures(self, limits_count: bool, case: &str) -> impl Iterator<Item = String> {
        let missed = self.missed.into_iter().filter(move |_| limits_count);
        let all = self.wrong.into_iter().chain(missed);
        all.map(move |failure| format!("{case}: {failure}"))
    }

    fn judge(&mut self, what: &str, measured: f64, limit: (&str, f64), kept: bool) {
        let verdict = if kept { "ok" } else { "MISSED" };
        let measured = written(measured);
        let limit = format!("{} {}", limit.0, written(limit.1));
        if !kept {
            self.missed.push(format!("{what} {measured}, not {limit}"));
        }
        self.row(what, measured, limit, verdict);
    }

    fn row(&mut self, what: &str, measured: String, limit: String, verdict: &str) {
        self.figures
            .add_row([what.to_owned(), measured, limit, verdict.to_owned()]);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n\n{}", self.spreads, self.figures)?;
        self.notes.iter().try_for_each(|line| write!(f, "\n{line}"))
    }
}

/// A ratio has decimals, a large number has none.
fn written(figure: f64) -> String {
    if figure.abs() < 100.0 && figure.fract() != 0.0 {
        format!("{figure:.2}")
    } else {
        format!("{figure:.0}")
    }
}
