"""OpenAI's newer dialect, Responses: items instead of messages, and conversations that the server
keeps."""
