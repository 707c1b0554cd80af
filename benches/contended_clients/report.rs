//! The figures of one run and their limits, as a table and as JSON.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::support;

pub struct Report {
    lines: Vec<Line>,
    notes: Vec<String>,
}

struct Line {
    what: String,
    measured: f64,
    at_most: Option<f64>,
}

impl Report {
    pub fn new() -> Self {
        Self {
            lines: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// A figure without a limit.
    pub fn figure(&mut self, what: &str, measured: f64) {
        self.line(what, measured, None);
    }

    pub fn at_most(&mut self, what: &str, measured: f64, limit: f64) {
        self.line(what, measured, Some(limit));
    }

    /// Adds a count that must be zero.
    pub fn never(&mut self, what: &str, count: usize) {
        self.at_most(what, count as f64, 0.0);
    }

    /// A line below the table.
    pub fn note(&mut self, line: String) {
        self.notes.push(line);
    }

    /// The limits that were missed. Limits of speed count only if `speed_counts`.
    pub fn missed(&self, speed_counts: bool) -> Vec<String> {
        let missed = self.lines.iter().filter(|line| !line.is_kept());
        missed
            .filter(|line| speed_counts || line.at_most == Some(0.0))
            .map(|line| {
                let limit = line.at_most.map_or(String::new(), written);
                format!("{}: {}, limit {limit}", line.what, written(line.measured))
            })
            .collect()
    }

    /// One object: a figure by its name with `_` for blanks, the missed limits, the notes.
    pub fn json(&self) -> Value {
        let figures = self.lines.iter();
        let figures = figures.map(|line| (line.what.replace(' ', "_"), json!(line.measured)));
        let mut all: Map<String, Value> = figures.collect();
        all.insert("missed".to_owned(), json!(self.missed(true)));
        all.insert("notes".to_owned(), json!(self.notes));
        Value::Object(all)
    }

    fn line(&mut self, what: &str, measured: f64, at_most: Option<f64>) {
        self.lines.push(Line {
            what: what.to_owned(),
            measured,
            at_most,
        });
    }
}

impl Line {
    /// Whether the limit is kept. An infinite ratio is no figure, and keeps no limit.
    fn is_kept(&self) -> bool {
        self.at_most.is_none_or(|limit| self.measured <= limit)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = support::table(["", "measured", "at most", ""]);
        for line in &self.lines {
            let limit = line.at_most.map_or(String::new(), written);
            let verdict = match line.at_most {
                None => "",
                Some(_) if line.is_kept() => "ok",
                Some(_) => "MISSED",
            };
            table.add_row([&line.what, &written(line.measured), &limit, verdict]);
        }
        write!(f, "{table}")?;
        self.notes.iter().try_for_each(|line| write!(f, "\n{line}"))
    }
}

fn written(figure: f64) -> String {
    if figure.abs() < 100.0 && figure.fract() != 0.0 {
        format!("{figure:.2}")
    } else {
        format!("{figure:.0}")
    }
}
