//! The article's three figures, ours and its own, and the tables, as one page of HTML. Measures nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use plotters::prelude::*;

use super::article;
use super::report::Scene;
use super::ways::Way;

const SIZE: (u32, u32) = (460, 320);
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
    for way in Way::ALL {
        let RGBColor(red, green, blue) = colour(way);
        let name = way.name();
        page.push_str(&format!(
            "<b style=\"color:rgb({red},{green},{blue})\">&#9632; {name}</b>&ensp;\n"
        ));
    }
    for (title, lines) in [
        ("Ours", ours(scenes)),
        ("The article's, on its machine", theirs()),
    ] {
        page.push_str(&format!("<h2>{title}</h2>\n"));
        let captions = [
            "bought per second",
            "retries per second",
            "mean wait to buy, ms",
        ];
        for (caption, lines) in captions.iter().zip(&lines) {
            page.push_str(&figure(caption, lines).map_err(|error| anyhow!("{error}"))?);
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

fn colour(way: Way) -> RGBColor {
    match way {
        Way::Watch => RGBColor(200, 30, 30),
        Way::MarketLock => RGBColor(220, 140, 0),
        Way::ItemLock => RGBColor(20, 120, 60),
        Way::Transaction => RGBColor(30, 80, 200),
        Way::PlainWatch => RGBColor(150, 60, 160),
    }
}

fn figure(caption: &str, lines: &[Line]) -> Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    let highest = lines.iter().flat_map(|(_, values)| values).flatten();
    // Above zero also where there were no retries at all.
    let highest = highest.fold(1.0_f64, |highest, &value| highest.max(value)) * 1.05;
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(caption, ("sans-serif", 16))
            .margin(10)
            .x_label_area_size(24)
            .y_label_area_size(56)
            .build_cartesian_2d(-0.2..2.2_f64, 0.0..highest)?;
        let load = |x: &f64| match x.round() {
            whole if (x - whole).abs() < 0.01 && whole >= 0.0 => LOADS[whole as usize].to_owned(),
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(3)
            .x_label_formatter(&load)
            .max_light_lines(0)
            .y_label_formatter(&|y| y.to_string())
            .draw()?;
        for (way, values) in lines {
            let style = colour(*way).stroke_width(2);
            let points = values.iter().enumerate();
            let points = points.filter_map(|(x, y)| Some((x as f64, (*y)?)));
            chart.draw_series(LineSeries::new(points.clone(), style))?;
            chart.draw_series(points.map(|point| Circle::new(point, 3, style.filled())))?;
        }
        area.present()?;
    }
    Ok(svg)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
