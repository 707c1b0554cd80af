//! The page of `cargo xtask market`: each figure of this machine beside the article's, on one scale, and the
//! tables. Measures nothing.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use comfy_table::{Row, Table};

use crate::article;
use crate::load::Run;
use crate::methods::Way;
use crate::report::Scene;

/// The loads, with the article's names and in words.
const LOADS: [(&str, &str); 3] = [
    ("1x1", "1 seller and 1 buyer"),
    ("5x1", "5 sellers and 1 buyer"),
    ("5x5", "5 sellers and 5 buyers"),
];
const STYLE: &str = "\
    body{font-family:sans-serif;margin:2em auto;max-width:1120px;color:#222}\
    .pair{display:flex;flex-wrap:wrap;gap:16px}figure{margin:0}figcaption{max-width:520px;margin:4px 0 16px}\
    table{border-collapse:collapse;font-size:14px}td,th{padding:2px 10px;text-align:right}\
    th{border-bottom:1px solid #888}tr:nth-child(even){background:#f4f4f4}\
    td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}";

/// The layout of a chart, in pixels.
const WIDTH: f64 = 540.0;
const PLOT: (f64, f64) = (130.0, 460.0);
const TOP: f64 = 48.0;
const LINE: f64 = 19.0;
/// The height of a load's heading.
const HEAD: f64 = 26.0;

/// A quantity that two charts compare.
struct Quantity {
    title: &'static str,
    /// The unit of the scale.
    unit: &'static str,
    here: Vec<Point>,
    article: Vec<Point>,
}

/// The figure of one way under one of the `LOADS`.
struct Point {
    load: usize,
    way: Way,
    figure: Option<f64>,
    /// Whether the article has only an upper bound: "less than" this figure.
    less: bool,
}

/// Writes the page and returns its path.
pub fn page(
    folder: &Path,
    machine: &str,
    scenes: &[Scene],
    tables: &[(String, Table)],
) -> anyhow::Result<PathBuf> {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>The \
        market</title><style>{STYLE}</style></head><body>\n<h1>The market</h1>\n<p>Sellers and buyers \
        trade on a market in Redis: on this machine, and in the article. Scales are logarithmic: each \
        vertical line is ten times the one to its left.</p>\n<p>{}</p>\n",
        escaped(machine)
    );
    for quantity in quantities(scenes) {
        let Quantity { title, unit, .. } = quantity;
        let scale = Scale::over(quantity.here.iter().chain(&quantity.article));
        write!(page, "<h2>{title}</h2>\n<div class=\"pair\">\n")?;
        for (whose, points) in [("here", &quantity.here), ("article", &quantity.article)] {
            let heading = match whose {
                "here" => "Here",
                _ => "The article, on its machine",
            };
            let chart = chart(heading, unit, &scale, points)?;
            let sentence = escaped(&sentence(title, points));
            writeln!(
                page,
                "<figure>{chart}<figcaption>{sentence}</figcaption></figure>"
            )?;
        }
        page.push_str("</div>\n");
    }
    for (title, table) in tables {
        write!(page, "<h2>{}</h2>\n{}", escaped(title), html(table))?;
    }
    page.push_str("</body></html>\n");
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let file = folder.join("index.html");
    fs::write(&file, page).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

const BOUGHT: &str = "Bought";
const RETRIES: &str = "Retries";
const WAIT: &str = "Wait to buy";

fn quantities(scenes: &[Scene]) -> [Quantity; 3] {
    let here = |figure: fn(&Run) -> Option<f64>| {
        let runs = (0..).zip(scenes);
        let runs = runs.flat_map(|(load, scene)| scene.runs.iter().map(move |run| (load, run)));
        let point = |(load, run): (usize, &Run)| Point {
            load,
            way: run.way,
            figure: figure(run),
            less: false,
        };
        runs.map(point).collect()
    };
    let article = |figure: fn(&article::Row) -> article::Figure, divisor: f64| {
        let mut points = Vec::new();
        for (load, rows) in article::TABLE.iter().enumerate() {
            for (row, way) in rows.iter().zip(Way::ALL) {
                let figure = figure(row);
                points.push(Point {
                    load,
                    way,
                    figure: Some(figure.number / divisor),
                    less: figure.less,
                });
            }
        }
        points
    };
    [
        Quantity {
            title: BOUGHT,
            unit: "items per second",
            here: here(|run| Some(run.per_second())),
            article: article(|row| row.bought, article::SECONDS),
        },
        Quantity {
            title: RETRIES,
            unit: "retries per second",
            here: here(|run| Some(run.retries as f64 / run.took.as_secs_f64())),
            article: article(|row| row.retries, article::SECONDS),
        },
        Quantity {
            title: WAIT,
            unit: "mean, in ms",
            here: here(|run| run.waits.mean().map(|wait| wait.as_secs_f64() * 1e3)),
            article: article(|row| row.wait, 1.0),
        },
    ]
}

/// The caption of a chart: the figures of a lock per item and of WATCH under the last load.
fn sentence(title: &str, points: &[Point]) -> String {
    let last = LOADS.len() - 1;
    let find = |way| {
        let mut points = points.iter();
        points.find(|point| point.load == last && point.way == way)
    };
    // The charts of this machine have two kinds of WATCH. The article has one kind, which is like plain WATCH.
    let (watch, name) = match find(Way::PlainWatch) {
        Some(plain) => (Some(plain), "plain WATCH"),
        None => (find(Way::Watch), "WATCH"),
    };
    let [watch, lock] = [watch, find(Way::ItemLock)].map(|point| point.map_or_else(unknown, text));
    let load = LOADS[last].1;
    match title {
        BOUGHT => {
            format!("With {load}, a lock per item buys {lock} items per second and {name} {watch}.")
        }
        RETRIES => format!(
            "With {load}, a lock per item retries {lock} times per second and {name} {watch} times."
        ),
        _ => format!(
            "With {load}, the mean wait in ms is {lock} with a lock per item and {watch} with {name}."
        ),
    }
}

/// Powers of ten around all figures above zero.
struct Scale {
    lowest: i32,
    highest: i32,
}

impl Scale {
    fn over<'a>(points: impl Iterator<Item = &'a Point>) -> Self {
        let figures = points.filter_map(|point| point.figure);
        let shown: Vec<f64> = figures.filter(|figure| is_shown(*figure)).collect();
        let lowest = shown.iter().copied().fold(f64::MAX, f64::min);
        let highest = shown.iter().copied().fold(0.0, f64::max);
        if shown.is_empty() {
            return Self {
                lowest: 0,
                highest: 1,
            };
        }
        let lowest = lowest.log10().floor() as i32;
        let highest = (highest.log10().ceil() as i32).max(lowest + 1);
        Self { lowest, highest }
    }

    /// The position of a figure; at the left edge if it is too small for a logarithm.
    fn at(&self, figure: f64) -> f64 {
        let (left, right) = PLOT;
        if !is_shown(figure) {
            return left;
        }
        let part =
            (figure.log10() - f64::from(self.lowest)) / f64::from(self.highest - self.lowest);
        left + part * (right - left)
    }
}

fn is_shown(figure: f64) -> bool {
    figure > 1e-6 && figure < 1e12
}

/// A chart in SVG. Each load has a line for each way, with the way's name to the left and its figure beside the dot.
fn chart(heading: &str, unit: &str, scale: &Scale, points: &[Point]) -> anyhow::Result<String> {
    let mut body = String::new();
    let mut y = TOP;
    for (load, (name, words)) in LOADS.iter().enumerate() {
        y += HEAD;
        writeln!(
            body,
            "<text x=\"8\" y=\"{}\" font-weight=\"bold\">{name}: {words}</text>",
            y - 7.0
        )?;
        for point in points.iter().filter(|point| point.load == load) {
            let (left, middle) = (PLOT.0, y + LINE / 2.0);
            let (name, colour, text) = (point.way.name(), colour(point.way), text(point));
            let right = scale.at(point.figure.unwrap_or(0.0));
            // A missing figure has no line and no dot.
            let radius = if is_known(point) { 5 } else { 0 };
            let baseline = middle + 4.0;
            writeln!(
                body,
                "<text x=\"{}\" y=\"{baseline}\" text-anchor=\"end\">{name}</text>\
                 <line x1=\"{left}\" y1=\"{middle}\" x2=\"{right:.1}\" y2=\"{middle}\" stroke=\"{colour}\" stroke-width=\"3\"/>\
                 <circle cx=\"{right:.1}\" cy=\"{middle}\" r=\"{radius}\" fill=\"{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{baseline}\" font-weight=\"bold\">{}</text>",
                left - 8.0,
                right + 9.0,
                escaped(&text)
            )?;
            y += LINE;
        }
    }
    let height = y + 40.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<text x=\"8\" y=\"22\" font-size=\"16\">{heading}: {unit}</text>\n"
    );
    for power in scale.lowest..=scale.highest {
        let x = scale.at(10_f64.powi(power));
        let mark = number(10_f64.powi(power));
        writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{y}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{mark}</text>",
            y + 16.0
        )?;
    }
    write!(svg, "{body}</svg>")?;
    Ok(svg)
}

fn is_known(point: &Point) -> bool {
    point.figure.is_some_and(f64::is_finite)
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// A figure as text: `4,680`, `less than 10`.
fn text(point: &Point) -> String {
    let less = if point.less { "less than " } else { "" };
    let figure = point.figure.filter(|figure| figure.is_finite());
    figure.map_or_else(unknown, |figure| format!("{less}{}", number(figure)))
}

/// A figure as text. It has decimals only below 100, and commas between thousands.
fn number(figure: f64) -> String {
    if figure == 0.0 {
        return "0".to_owned();
    }
    if figure < 100.0 {
        let decimals = if figure < 0.1 {
            3
        } else if figure < 10.0 {
            2
        } else {
            1
        };
        let text = format!("{figure:.decimals$}");
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    let digits = format!("{figure:.0}");
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn colour(way: Way) -> &'static str {
    match way {
        Way::Watch => "#c81e1e",
        Way::MarketLock => "#dc8c00",
        Way::ItemLock => "#14783c",
        Way::Transaction => "#1e50c8",
        Way::PlainWatch => "#963ca0",
    }
}

/// A terminal's table, for a page. Leaves out the bar that separates the table's two halves.
fn html(table: &Table) -> String {
    let row = |row: &Row, kind: &str| {
        let cells = row.cell_iter().map(|cell| {
            let text = escaped(cell.content().trim_start_matches('|').trim());
            format!("<{kind}>{text}</{kind}>")
        });
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let header = table
        .header()
        .map_or_else(String::new, |header| row(header, "th"));
    let rows: String = table.row_iter().map(|cells| row(cells, "td")).collect();
    format!("<table>\n<thead>{header}</thead>\n<tbody>\n{rows}</tbody></table>\n")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(way: Way, figure: Option<f64>) -> Point {
        Point {
            load: 2,
            way,
            figure,
            less: way == Way::ItemLock,
        }
    }

    #[test]
    fn a_chart_labels_each_dot_with_its_figure() -> anyhow::Result<()> {
        let points = [
            point(Way::Watch, Some(0.0)),
            point(Way::ItemLock, Some(4_680.4)),
            point(Way::Transaction, Some(f64::NAN)),
            point(Way::MarketLock, None),
        ];
        let scale = Scale::over(points.iter());
        assert_eq!((scale.lowest, scale.highest), (3, 4));
        let svg = chart("Here", "items per second", &scale, &points)?;
        for label in [
            ">0<",
            ">less than 4,680<",
            ">unknown<",
            ">lock per item<",
            ">10,000<",
        ] {
            assert!(svg.contains(label), "{label}: {svg}");
        }
        assert_eq!(svg.matches("r=\"5\"").count(), 2, "dots: {svg}");
        assert!(!svg.contains("NaN"), "{svg}");
        Ok(())
    }

    #[test]
    fn sentences_name_the_figures_of_the_last_load() {
        let points = [
            point(Way::Watch, Some(14.0)),
            point(Way::ItemLock, Some(2.5)),
        ];
        let words = "With 5 sellers and 5 buyers, a lock per item buys less than 2.5 items per second and WATCH 14.";
        assert_eq!(sentence(BOUGHT, &points), words);
        let words = "With 5 sellers and 5 buyers, the mean wait in ms is less than 2.5 with a lock per item and 14 with WATCH.";
        assert_eq!(sentence(WAIT, &points), words);
    }

    #[test]
    fn numbers_keep_three_digits() {
        let numbers = [0.0, 0.0123, 0.25, 1.0, 12.34, 847.6, 1_234_567.0].map(number);
        assert_eq!(
            numbers,
            ["0", "0.012", "0.25", "1", "12.3", "848", "1,234,567"]
        );
    }

    #[test]
    fn tables_are_written_in_html() {
        let mut table = Table::new();
        table.set_header(["way", "| bought"]);
        table.add_row(["a < b", "| 5"]);
        let html = html(&table);
        assert!(
            html.contains("<tr><th>way</th><th>bought</th></tr>"),
            "{html}"
        );
        assert!(
            html.contains("<tr><td>a &lt; b</td><td>5</td></tr>"),
            "{html}"
        );
    }
}
