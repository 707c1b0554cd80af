//! Makes a test of each Rust block in README.md and docs/: its text unchanged, except that the address of a
//! private server replaces the usual one. Judges nothing.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const ADDRESS: &str = "\"redis://127.0.0.1:6379\"";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::var("CARGO_MANIFEST_DIR")?;
    let root = Path::new(&folder).join("../..");
    let docs = root.join("docs");
    let mut pages = vec![root.join("README.md")];
    println!("cargo:rerun-if-changed={}", pages[0].display());
    if docs.is_dir() {
        println!("cargo:rerun-if-changed={}", docs.display());
        for entry in fs::read_dir(docs)? {
            pages.push(entry?.path());
        }
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    pages.sort();
    let mut tests = String::new();
    for page in &pages {
        tests += &tests_of(page)?;
    }
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("tests.rs"), tests)?;
    Ok(())
}

/// The tests of one page, each named after the page and the line.
fn tests_of(page: &Path) -> Result<String, Box<dyn Error>> {
    let name = page.file_stem().unwrap_or_default().to_string_lossy();
    let name = name.to_lowercase().replace('-', "_");
    let text = fs::read_to_string(page)?;
    let mut tests = String::new();
    let mut lines = text.lines().enumerate();
    while let Some((line, fence)) = lines.next() {
        let is_rust = fence.strip_prefix("```").is_some_and(|words| {
            let mut words = words.split(',');
            words.next() == Some("rust") && words.all(|word| word != "compile_fail")
        });
        if !is_rust {
            continue;
        }
        let block: Vec<&str> = (&mut lines)
            .map(|(_, line)| line)
            .take_while(|line| *line != "```")
            .collect();
        let code = block.join("\n").replace(ADDRESS, "crate::url()");
        let line = line + 1;
        write!(tests, "#[test]\nfn {name}_line_{line}() {{\n")?;
        if code.contains("fn main()") {
            write!(tests, "{code}\nmain().unwrap();\n}}\n\n")?;
        } else {
            let main = "fn main() -> Result<(), Box<dyn std::error::Error>>";
            let client = "let client = crate::client();";
            write!(
                tests,
                "{main} {{\n{client}\n{code}\nOk(())\n}}\nmain().unwrap();\n}}\n\n"
            )?;
        }
    }
    Ok(tests)
}
