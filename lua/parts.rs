//! How a script is put together: a line `-- part: <file>` stands for that file.

/// The parts by their names. Each may name those behind it.
pub const PARTS: [(&str, &str); 8] = [
    ("join.lua", include_str!("join.lua")),
    ("stored.lua", include_str!("stored.lua")),
    ("foreign.lua", include_str!("foreign.lua")),
    ("token.lua", include_str!("token.lua")),
    ("count.lua", include_str!("count.lua")),
    ("serve.lua", include_str!("serve.lua")),
    ("near.lua", include_str!("near.lua")),
    ("primary.lua", include_str!("primary.lua")),
];

/// A script with all of its parts.
pub fn whole(script: &str) -> String {
    PARTS
        .iter()
        .fold(script.to_owned(), |script, (name, part)| {
            script.replace(&format!("-- part: {name}"), part)
        })
}
