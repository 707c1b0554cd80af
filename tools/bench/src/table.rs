//! Rows as text: a table for the terminal, and one in Markdown. Measures nothing.

use comfy_table::Table;
use leasehold_tools::table::plain;

use crate::row::{Quantiles, Row};
use crate::run::Outcome;

const HEADER: [&str; 13] = [
    "",
    "ratio",
    "middle half",
    "pairs/s",
    "fairness",
    "wait at full speed, µs",
    "wait at half of raw's rate, µs",
    "connections",
    "requests",
    "bytes",
    "client CPU, µs",
    "server CPU, µs",
    "server CPU, ratio",
];

pub fn terminal(outcome: &Outcome) -> String {
    let table = in_terminal(&HEADER, 1, outcome.rows.iter().map(cells));
    format!("{}: {}\n{table}", outcome.name, outcome.title)
}

pub fn markdown(outcome: &Outcome) -> String {
    in_markdown(&HEADER, 1, outcome.rows.iter().map(cells))
}

/// A table for the terminal. The first `names` columns are text, and the others are figures.
pub fn in_terminal<const N: usize>(
    header: &[&str; N],
    names: usize,
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.set_header(header);
    table.add_rows(rows);
    plain(table, names)
}

/// The same table in Markdown.
pub fn in_markdown<const N: usize>(
    header: &[&str; N],
    names: usize,
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&header.map(str::to_owned));
    let (left, right) = ("---|".repeat(names), "---:|".repeat(N - names));
    text += &format!("|{left}{right}\n");
    for row in rows {
        text += &line(&row);
    }
    text
}

fn cells(row: &Row) -> [String; HEADER.len()] {
    let waits = |wait: Option<Quantiles>| {
        let all = wait.map(|wait| wait.all().map(written).join(" / "));
        all.unwrap_or_else(|| "-".to_owned())
    };
    [
        row.way().to_owned(),
        written(row.ratio),
        format!("{} - {}", written(row.ratio_low), written(row.ratio_high)),
        format!("{:.0}", row.pairs_per_second),
        written(row.fairness),
        waits(row.wait),
        waits(row.paced.as_ref().map(|paced| paced.wait)),
        row.connections.to_string(),
        written(row.requests_per_pair),
        format!("{:.0}", row.bytes_per_pair),
        written(row.client_cpu_per_pair),
        written(row.server_cpu_per_pair),
        row.server_cpu_ratio.map_or("-".to_owned(), written),
    ]
}

/// A figure with three digits. From a hundred on, it has no decimals.
pub fn written(figure: f64) -> String {
    let size = figure.abs();
    let decimals = match size {
        _ if !size.is_finite() => return "-".to_owned(),
        _ if size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{figure:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_with_three_digits() {
        let figures = [0.0456, 2.345, 23.45, 234.5, 23456.0, f64::NAN];
        let wanted = ["0.046", "2.35", "23.4", "234", "23456", "-"];
        for (figure, wanted) in figures.into_iter().zip(wanted) {
            assert_eq!(written(figure), wanted);
        }
    }
}
