//! The reference of configuration files in `docs/configuration.md`, written from `configs/schema.json`.
//!
//! After a change of the schema, write it anew and read the difference:
//! ```text
//! EGM_PAGES=write cargo test -p egm-vmm --test readme && git diff docs/configuration.md
//! ```

use std::fmt::Write as _;
use std::fs;

use serde_json::{Map, Value};

const PAGE: &str = "../docs/configuration.md";
const SCHEMA: &str = "../configs/schema.json";
/// What stands above this line is written by hand.
const MARK: &str =
    "<!-- From here on written from configs/schema.json by vmm/tests/readme/configuration.rs -->\n";
const COLUMNS: usize = 116;

#[test]
fn the_configuration_reference_is_that_of_the_schema() {
    let page = fs::read_to_string(PAGE).unwrap();
    let (by_hand, generated) = page.split_once(MARK).unwrap();
    let schema = serde_json::from_str(&fs::read_to_string(SCHEMA).unwrap()).unwrap();
    let reference = Reference::of(&schema);
    if std::env::var_os("EGM_PAGES").is_some_and(|value| value == "write") {
        fs::write(PAGE, format!("{by_hand}{MARK}{reference}")).unwrap();
    } else {
        assert!(
            generated == reference,
            "docs/configuration.md: run EGM_PAGES=write cargo test -p egm-vmm --test readme"
        );
    }
}

/// The page while it is written, and the objects that still need a section.
struct Reference<'a> {
    definitions: &'a Map<String, Value>,
    sections: Vec<(String, &'a Value)>,
    page: String,
}

impl<'a> Reference<'a> {
    fn of(schema: &'a Value) -> String {
        let definitions = schema["$defs"].as_object().unwrap();
        let sections = vec![("The file".to_owned(), schema)];
        let mut reference = Self { definitions, sections, page: String::new() };
        while !reference.sections.is_empty() {
            let (path, schema) = reference.sections.remove(0);
            reference.section(&path, schema);
        }
        reference.page
    }

    /// A section for an object, or one for each form of an object with a `type`.
    fn section(&mut self, path: &str, schema: &'a Value) {
        let prefix = if path == "The file" { "" } else { path };
        let title = if prefix.is_empty() { path.to_owned() } else { format!("`{path}`") };
        write!(self.page, "\n## {title}\n\n").unwrap();
        self.paragraph("", schema);
        let Some(forms) = schema["oneOf"].as_array() else {
            self.page.push('\n');
            return self.keys(prefix, schema);
        };
        // Keys without a description of their own are in the one above.
        for form in forms.iter().filter(|form| form["properties"].is_object()) {
            let name = form["properties"]["type"]["const"].as_str().unwrap();
            write!(self.page, "\n### `\"type\": \"{name}\"`\n\n").unwrap();
            self.paragraph("", form);
            if form["properties"].as_object().unwrap().values().any(|value| value["description"].is_string())
            {
                self.page.push('\n');
                self.keys(prefix, form);
            }
        }
    }

    /// One item for each key, required ones first.
    fn keys(&mut self, path: &str, schema: &'a Value) {
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let mut keys: Vec<_> = schema["properties"].as_object().unwrap().iter().collect();
        keys.retain(|(_, value)| value["description"].is_string());
        keys.sort_by_key(|(key, _)| !required.contains(&key.as_str()));
        for (key, value) in keys {
            let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            let kind = self.kind(&inner, value);
            let need = if required.contains(&key.as_str()) { ", required" } else { "" };
            self.paragraph(&format!("- `{key}` ({kind}{need})"), value);
        }
    }

    /// The type of a value in words; an object is queued for a section of its own.
    fn kind(&mut self, path: &str, value: &'a Value) -> String {
        if let Some(name) = value["$ref"].as_str() {
            let definition = &self.definitions[name.trim_start_matches("#/$defs/")];
            return self.kind(path, definition);
        }
        if let Some(forms) = value["anyOf"].as_array() {
            let mut kinds: Vec<String> = forms
                .iter()
                .filter(|form| form["type"] != "null")
                .map(|form| self.kind(path, form))
                .collect();
            kinds.dedup();
            let either = kinds.join(" or ");
            return if either == "text such as `\"64GiB\"` or integer" { "size".to_owned() } else { either };
        }
        if let Some(forms) = value["oneOf"].as_array() {
            let words: Vec<String> = forms
                .iter()
                .filter_map(|form| form["const"].as_str())
                .map(|word| format!("`\"{word}\"`"))
                .collect();
            return if words.is_empty() { self.object(path, value) } else { words.join(", ") };
        }
        if let Some(words) = value["enum"].as_array() {
            return words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
        }
        let kind = value["type"].as_array().map_or(&value["type"], |kinds| &kinds[0]);
        match kind.as_str().unwrap() {
            "array" => format!("list of: {}", self.kind(path, &value["items"])),
            "object" if value["properties"].is_object() => self.object(path, value),
            "object" => format!("object of: {}", self.kind(path, &value["additionalProperties"])),
            "string" => match value["examples"][0].as_str() {
                Some(example) => format!("text such as `\"{example}\"`"),
                None => "text".to_owned(),
            },
            other => other.to_owned(),
        }
    }

    fn object(&mut self, path: &str, value: &'a Value) -> String {
        if !self.sections.iter().any(|(other, _)| other == path) {
            self.sections.push((path.to_owned(), value));
        }
        let anchor: String = path.chars().filter(|c| c.is_alphanumeric() || "_-".contains(*c)).collect();
        format!("[object](#{anchor})")
    }

    /// `lead` and the description of `schema`, wrapped; further lines of an item are indented.
    fn paragraph(&mut self, lead: &str, schema: &Value) {
        let description = schema["description"].as_str().unwrap_or_default();
        let text = if lead.is_empty() || description.is_empty() {
            format!("{lead}{description}")
        } else {
            format!("{lead}: {description}")
        };
        let indent = if lead.is_empty() { "" } else { "  " };
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.trim().is_empty() && line.chars().count() + 1 + word.chars().count() > COLUMNS {
                writeln!(self.page, "{line}").unwrap();
                line = indent.to_owned();
            } else if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        writeln!(self.page, "{line}").unwrap();
    }
}
