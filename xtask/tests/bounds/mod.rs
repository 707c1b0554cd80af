//! Reads docs/bounds.md: the constants and the texts of scripts that it quotes, and whether the sources have them.

use std::path::{Path, PathBuf};

/// A folder or module of the library, and the constants that its files define: names, types and values.
struct Constant {
    module: String,
    name: String,
    kind: String,
    value: String,
}

/// The quoted texts of the page that differ from the sources.
pub fn wrong_quotes(page: &str, sources: &[(PathBuf, String)]) -> Vec<String> {
    let constants = constants(sources);
    let mut wrong = Vec::new();
    for quote in quotes(page) {
        if let Some((file, text)) = quote.split_once(".lua: ") {
            let file = PathBuf::from(format!("{file}.lua"));
            let has_it =
                |(path, content): &(PathBuf, String)| *path == file && content.contains(text);
            if !sources.iter().any(has_it) {
                wrong.push(format!("`{quote}`: the script does not contain this"));
            }
        } else if let Some((path, value)) = quote.split_once(" = ") {
            let found: Vec<_> = constants.iter().filter(|it| it.is_at(path)).collect();
            match found[..] {
                [found] if found.value == value => {}
                [found] => wrong.push(format!("`{quote}`: the value is {}", found.value)),
                [] => wrong.push(format!("`{quote}`: there is no such constant")),
                _ => wrong.push(format!("`{quote}`: several constants; name the module")),
            }
        }
    }
    wrong
}

/// The constants of the library that bound a number or a size, and that the page does not name.
pub fn forgotten(page: &str, sources: &[(PathBuf, String)]) -> Vec<String> {
    let quotes = quotes(page);
    let is_named = |constant: &Constant| {
        let mut paths = quotes.iter().filter_map(|quote| quote.split_once(" = "));
        paths.any(|(path, _)| constant.is_at(path))
    };
    // Bounds of settings are on the page of settings.
    let is_of_settings =
        |module: &str| ["config", "locks"].iter().any(|it| starts_with(module, it));
    let constants = constants(sources).into_iter().filter(|constant| {
        let bounds = constant.name.starts_with("MAX_") || constant.name.starts_with("MOST_");
        bounds && constant.kind == "usize" && !is_of_settings(&constant.module)
    });
    let missing = constants.filter(|constant| !is_named(constant));
    missing
        .map(|it| format!("{}::{}", it.module, it.name))
        .collect()
}

impl Constant {
    /// Whether `path` names this constant: its name, behind its module or a module around that.
    fn is_at(&self, path: &str) -> bool {
        let named = path.rsplit_once("::");
        named.is_some_and(|(module, name)| name == self.name && starts_with(&self.module, module))
    }
}

fn starts_with(module: &str, other: &str) -> bool {
    let rest = module.strip_prefix(other);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The texts between backticks in the rows of tables.
fn quotes(page: &str) -> Vec<&str> {
    let rows = page.lines().filter(|line| line.starts_with('|'));
    rows.flat_map(|row| row.split('`').skip(1).step_by(2))
        .collect()
}

/// The constants of files in `src/` that are not tests.
fn constants(sources: &[(PathBuf, String)]) -> Vec<Constant> {
    let mut constants = Vec::new();
    for (path, text) in sources {
        let Some(module) = super::layers::module_of(path).filter(|_| !is_of_tests(path)) else {
            continue;
        };
        let text = text.split("\nmod tests {").next().unwrap_or_default();
        for (at, _) in text.match_indices("const ") {
            let declared = text[at + "const ".len()..].split_once(';');
            let Some((head, value)) = declared.and_then(|(text, _)| text.split_once(" = ")) else {
                continue;
            };
            let Some((name, kind)) = head.split_once(": ") else {
                continue;
            };
            if name
                .chars()
                .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
            {
                constants.push(Constant {
                    module: module.clone(),
                    name: name.to_owned(),
                    kind: kind.to_owned(),
                    value: without_models(value),
                });
            }
        }
    }
    constants
}

/// The value outside of models: some constants are smaller there.
fn without_models(value: &str) -> String {
    let value = value.split_whitespace().collect::<Vec<_>>().join(" ");
    let in_models = value.starts_with("if cfg!(all(test, shuttle)) {");
    match value.split_once("} else { ") {
        Some((_, other)) if in_models => other.trim_end_matches(" }").to_owned(),
        _ => value,
    }
}

fn is_of_tests(path: &Path) -> bool {
    let path = path.with_extension("");
    path.iter().any(|part| part == "tests" || part == "model")
}

#[test]
fn wrong_and_forgotten_bounds_are_found() {
    let sources = [
        (
            "src/a/b.rs",
            "const MAX_A: usize = 1;\nconst PAUSE: u8 = 2;\nmod tests {\nconst MAX_T: usize = 1;",
        ),
        (
            "src/a/c.rs",
            "pub const MOST_C: usize = if cfg!(all(test, shuttle)) { 1 } else { 3 };",
        ),
        ("src/d.rs", "const PAUSE: u8 = 4;\nconst MAX_D: usize = 5;"),
        ("lua/e.lua", "if n < 10 then"),
    ];
    let sources = sources.map(|(path, text)| (PathBuf::from(path), text.to_owned()));
    let right = "| `a::MAX_A = 1`, `a::c::MOST_C = 3` | `d::PAUSE = 4` `lua/e.lua: n < 10` |";
    assert_eq!(wrong_quotes(right, &sources), [""; 0]);
    assert_eq!(forgotten(right, &sources), ["d::MAX_D"]);
    let wrong = "| `a::b::MAX_A = 2` | `d::MAX_A = 1` | `lua/e.lua: n < 9` |";
    assert_eq!(wrong_quotes(wrong, &sources).len(), 3);
    assert_eq!(
        forgotten("", &sources),
        ["a::b::MAX_A", "a::c::MOST_C", "d::MAX_D"]
    );
}
