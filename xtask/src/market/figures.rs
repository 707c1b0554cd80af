//! The article's three figures, ours and its own, and the tables, as one page of HTML. Measures nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::article;
use super::report::Scene;
use super::ways::Way;
use crate::chart::{Chart, Colour, Scale, Series};

const LOADS: [&str; 3] = ["1x1", "5x1", "5x5"];

/// One way's values over the loads; `None` where there is none.
type Line = (Way, Vec<Option<f64>>);

/// Writes the page; where.
pub fn page(
    folder: &Path,
    scenes: &[Scene],
    texts: &[(String, String)],
) -> anyhow::Result<PathBuf> {
    let mut page = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>The market</title>\
         <style>body{font-family:sans-serif;margin:2em}pre{overflow-x:auto;font-size:12px}\
         svg{margin:0 8px 8px 0;border:1px solid #ddd}</style></head><body>\n<h1>The market</h1>\n",
    );
    for (title, lines) in [
        ("Ours", ours(scenes)),
        ("The article's, on its machine", theirs()),
    ] {
        page.push_str(&format!("<h2>{title}</h2>\n"));
        let captions = [
            ("Bought", "items per second"),
            ("Retries", "retries per second"),
            ("Wait to buy", "mean, ms"),
        ];
        for ((caption, unit), lines) in captions.into_iter().zip(lines) {
            page.push_str(&figure(caption, unit, lines)?);
        }
    }
    for (title, text) in texts {
        page.push_str(&format!(
            "\n<h2>{}</h2>\n<pre>{}</pre>\n",
            escaped(title),
            escaped(text)
        ));
    }
    page.push_str("</body></html>\n");
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let file = folder.join("index.html");
    fs::write(&file, page).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

fn ours(scenes: &[Scene]) -> [Vec<Line>; 3] {
    let lines = |value: &dyn Fn(&super::load::Run) -> Option<f64>| {
        let line = |(n, way): (usize, Way)| {
            let values = scenes.iter().map(|scene| value(&scene.runs[n]));
            (way, values.collect())
        };
        Way::ALL.into_iter().enumerate().map(line).collect()
    };
    [
        lines(&|run| Some(run.per_second())),
        lines(&|run| Some(run.retries as f64 / run.took.as_secs_f64())),
        lines(&|run| run.waits.mean().map(|wait| wait.as_secs_f64() * 1e3)),
    ]
}

fn theirs() -> [Vec<Line>; 3] {
    let lines = |value: fn(&article::Row) -> f64| {
        let line = |n: usize| {
            let values = article::TABLE.iter().map(|ways| Some(value(&ways[n])));
            (Way::ALL[n], values.collect())
        };
        (0..3).map(line).collect()
    };
    [
        lines(|row| row.bought.number / article::SECONDS),
        lines(|row| row.retries.number / article::SECONDS),
        lines(|row| row.wait.number),
    ]
}

fn figure(title: &str, up: &str, lines: Vec<Line>) -> anyhow::Result<String> {
    let series = lines.into_iter().map(|(way, figures)| Series {
        name: way.name(),
        colour: colour(way),
        figures,
    });
    let chart = Chart {
        title,
        across: "sellers x buyers",
        places: &LOADS,
        up,
        series: series.collect(),
    };
    chart.lines(Scale::FromZero)
}

fn colour(way: Way) -> Colour {
    match way {
        Way::Watch => Colour(200, 30, 30),
        Way::MarketLock => Colour(220, 140, 0),
        Way::ItemLock => Colour(20, 120, 60),
        Way::Transaction => Colour(30, 80, 200),
        Way::PlainWatch => Colour(150, 60, 160),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
