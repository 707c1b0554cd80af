//! Plots of shared locks.

use leasehold_tools::chart::{Chart, Colour, Series};

use super::report::{Outcome, Row};

const WAYS: [(&str, Colour); 4] = [
    ("raw", Colour(0x66, 0x66, 0x66)),
    ("leasehold", Colour(0x1b, 0x5e, 0xa8)),
    ("mutex", Colour(0xc0, 0xa0, 0x30)),
    ("redisson", Colour(0xc6, 0x4a, 0x1e)),
];

/// The plots of these outcomes, with the names of their files.
pub fn all(outcomes: &[Outcome]) -> anyhow::Result<Vec<(&'static str, String)>> {
    let grants = |row: &Row| Some(row.grants_per_second);
    let cpu = |row: &Row| Some(row.server_cpu_per_grant);
    let longest = |row: &Row| Some(row.first_wait?.max / 1000.0);
    let plots: [Plot<'_>; 3] = [
        (
            "shares-rw.svg",
            "rw-",
            "% of reads, hold",
            "Readers and writers, 4 processes of 16 threads",
            "grants per second",
            &grants,
        ),
        (
            "shares-readers.svg",
            "rw-beside-",
            "other readers",
            "CPU of Redis for a read lock and its release",
            "µs",
            &cpu,
        ),
        (
            "shares-permits.svg",
            "semaphore-",
            "case",
            "The longest wait for a permit",
            "ms",
            &longest,
        ),
    ];
    let mut drawn = Vec::new();
    for (file, part, across, title, up, figure) in plots {
        let shown: Vec<_> = outcomes
            .iter()
            .filter_map(|outcome| Some((outcome.name.strip_prefix(part)?, outcome)))
            // Cases with other numbers of threads do not have a common scale.
            .filter(|(place, _)| part != "rw-" || place.ends_with("ms"))
            .collect();
        if !shown.is_empty() {
            drawn.push((file, lines(&shown, across, title, up, figure)?));
        }
    }
    Ok(drawn)
}

/// A plot: its file, the start of the names of its cases, the labels of its axes and its title, and the figure of a
/// row.
type Plot<'a> = (
    &'static str,
    &'a str,
    &'a str,
    &'a str,
    &'a str,
    &'a dyn Fn(&Row) -> Option<f64>,
);

fn lines(
    shown: &[(&str, &Outcome)],
    across: &str,
    title: &str,
    up: &str,
    figure: &dyn Fn(&Row) -> Option<f64>,
) -> anyhow::Result<String> {
    let places: Vec<_> = shown.iter().map(|(place, _)| *place).collect();
    let series = WAYS.iter().filter_map(|(name, colour)| {
        let of_case = |(_, outcome): &(&str, &Outcome)| {
            let row = outcome.rows.iter().find(|row| row.way() == *name);
            row.and_then(figure)
        };
        let figures: Vec<_> = shown.iter().map(of_case).collect();
        let has_some = figures.iter().any(Option::is_some);
        has_some.then_some(Series {
            name,
            colour: *colour,
            figures,
        })
    });
    let chart = Chart {
        title,
        across,
        places: &places,
        up,
        series: series.collect(),
    };
    chart.lines()
}
