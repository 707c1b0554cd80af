//! The results of one case: spreads, figures, limits and whether they were kept.

use std::fmt;

use comfy_table::Table;
use hdrhistogram::Histogram;

use crate::support;

pub struct Report {
    spreads: Table,
    figures: Table,
    notes: Vec<String>,
    /// Ratios that missed their limits.
    missed: Vec<String>,
    /// Times that missed their limits.
    missed_times: Vec<String>,
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
            missed_times: Vec::new(),
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

    /// A ratio of two figures of this run, with its limit.
    pub fn at_least(&mut self, what: &str, measured: f64, limit: f64) {
        let missed = self.judge(what, measured, ("at least", limit), measured >= limit);
        self.missed.extend(missed);
    }

    /// A ratio of two figures of this run, with its limit.
    pub fn at_most(&mut self, what: &str, measured: f64, limit: f64) {
        let missed = self.judge(what, measured, ("at most", limit), measured <= limit);
        self.missed.extend(missed);
    }

    /// A time with its limit, which no machine can keep while its cores are busy.
    pub fn time_at_most(&mut self, what: &str, measured: f64, limit: f64) {
        let missed = self.judge(what, measured, ("at most", limit), measured <= limit);
        self.missed_times.extend(missed);
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

    /// The failures as text. Missed limits of speed are failures only if `limits_count`, and those of times only if
    /// `times_count`, too.
    pub fn failures(
        self,
        limits_count: bool,
        times_count: bool,
        case: &str,
    ) -> impl Iterator<Item = String> {
        let times = self.missed_times.into_iter().filter(move |_| times_count);
        let missed = self.missed.into_iter().chain(times);
        let all = self
            .wrong
            .into_iter()
            .chain(missed.filter(move |_| limits_count));
        all.map(move |failure| format!("{case}: {failure}"))
    }

    /// Adds a row with the limit. Returns the miss as text.
    fn judge(
        &mut self,
        what: &str,
        measured: f64,
        limit: (&str, f64),
        kept: bool,
    ) -> Option<String> {
        let verdict = if kept { "ok" } else { "MISSED" };
        let measured = written(measured);
        let limit = format!("{} {}", limit.0, written(limit.1));
        let missed = (!kept).then(|| format!("{what} {measured}, not {limit}"));
        self.row(what, measured, limit, verdict);
        missed
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
